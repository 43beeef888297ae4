"""What generation_config.json recommends: sampling values and end-of-text ids."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapid_llm.errors import CheckpointError
from rapid_llm.models.config_keys import is_finite_number, read_token_ids

logger = logging.getLogger(__name__)

# Values that change which token is drawn and that this version does not apply, with the value that turns each off.
_NOT_APPLIED = {
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": None,
    "num_beams": 1,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "min_new_tokens": None,
    "exponential_decay_length_penalty": None,
}


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values that a checkpoint recommends for chat; None where it says nothing.

    Attributes:
        temperature: 0 where the file says ``do_sample: false``, which is its way to ask for greedy decoding.
        top_p, top_k, min_p, repetition_penalty: as in SamplingParams.
        eos_token_ids: ids that end an answer, beside those of the config and the tokenizer.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], file: Path) -> "GenerationDefaults":
        """Read the keys of generation_config.json. Sampling keys that this version does not apply are logged by name.

        Raises:
            CheckpointError: a value of the wrong type or out of range, naming the key.
        """
        left_out = sorted(key for key, neutral in _NOT_APPLIED.items() if raw.get(key) not in (None, neutral))
        if left_out:
            logger.warning("%s: not applied by this version: %s", file, ", ".join(left_out))
        temperature = _number(raw, "temperature", file, "a finite number >= 0", 0.0, math.inf)
        top_k = _number(raw, "top_k", file, "an integer >= -1", -1, math.inf)
        if top_k is not None and not isinstance(raw["top_k"], int):
            raise _refused(file, "top_k", raw["top_k"], "an integer >= -1")
        return cls(
            temperature=0.0 if raw.get("do_sample") is False else temperature,
            top_p=_number(raw, "top_p", file, "0 < value <= 1", math.ulp(0.0), 1.0),
            top_k=None if top_k is None else int(top_k),
            min_p=_number(raw, "min_p", file, "0 <= value <= 1", 0.0, 1.0),
            repetition_penalty=_number(raw, "repetition_penalty", file, "0.01 <= value <= 100", 0.01, 100.0),
            eos_token_ids=read_token_ids(raw, "eos_token_id", file),
        )


def _number(raw: Mapping[str, Any], key: str, file: Path, wanted: str, low: float, high: float) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if not is_finite_number(value) or not low <= value <= high:
        raise _refused(file, key, value, wanted)
    return float(value)


def _refused(file: Path, key: str, value: Any, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: key {key!r} is out of range", got=repr(value), wanted=wanted, change=f"correct or remove {key}"
    )
