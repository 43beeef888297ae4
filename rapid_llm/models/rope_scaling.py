"""How a model stretches its rotary frequencies past the context it was first trained on. Data, torch-free."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rapid_llm.errors import CheckpointError
from rapid_llm.models.config_keys import Keys, equal

Kind = Literal["linear", "llama3", "yarn", "dynamic", "factors"]

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# What each type may say beside the common keys; anything else would change the maths unseen.
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor", "original_max_position_embeddings"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    },
}
ROPE_TYPES = tuple(_KEYS)
"""Values of "rope_type" that are read."""

GGUF_ROPE_TYPES = ("none", "linear", "yarn")
"""Values of "rope.scaling.type" that are read."""

# Finer settings of yarn that no known converter writes with another value.
_GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
}


@dataclass(frozen=True)
class RopeScaling:
    """One scaling, with every default settled.

    Attributes:
        kind: "linear": all frequencies are divided by ``factor`` (kaiokendev 2023, https://kaiokendev.github.io/context).
            "llama3": long waves are, short ones are not, with a blend between (Llama 3.1, arXiv:2407.21783).
            "yarn": as llama3 with the blend over dimensions, and q and k grow by ``attention_factor`` (Peng et al. 2023,
            arXiv:2309.00071). "dynamic": plain frequencies, up to the original context only. "factors": divisors from a
            GGUF file's rope_freqs tensor.
        factor: how much longer the context became.
        original_context: tokens of the context before that.
        low_freq_factor, high_freq_factor: llama3: waves that fit less often than the first, or more often than the second,
            into the original context are long, or short.
        beta_fast, beta_slow: yarn: turns within the original context between which it blends.
        attention_factor: yarn: cosines and sines are multiplied by it.
        truncate: yarn: the blend begins and ends at whole dimensions.
        divisors: factors: one divisor a frequency.
    """

    kind: Kind
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    def context(self, max_position_embeddings: int) -> int:
        """The longest sequence, in tokens, of a model whose config says ``max_position_embeddings``."""
        if self.kind == "dynamic":  # its frequencies would depend on the length beyond: they differ between steps
            return min(max_position_embeddings, self.original_context)
        if self.kind == "yarn":  # Qwen's configs keep the original context there
            return max(max_position_embeddings, round(self.original_context * self.factor))
        return max_position_embeddings


def rope_from_hf(keys: Keys, max_position_embeddings: int, default_theta: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """The rotary base and the scaling of a config.json.

    Both stand at the top level and in "rope_scaling", or (newer exports) in "rope_parameters". Where something stands twice the
    two must agree.

    Raises:
        CheckpointError: a type that is not served, a key that its type does not have, or values that contradict each other.
    """
    thetas: dict[str, float] = {}
    scalings: dict[str, RopeScaling | None] = {}
    for key in ("rope_scaling", "rope_parameters"):
        inner = keys.raw.get(key)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise keys.refused(key, "an object or null")
        scalings[key] = _scaling(key, inner, keys.file, max_position_embeddings)
        if inner.get("rope_theta") is not None:
            thetas[key] = Keys(inner, keys.file).positive("rope_theta", default=0.0)
    if keys.raw.get("rope_theta") is not None:
        thetas["rope_theta"] = keys.positive("rope_theta", default=0.0)
    for what, found in (("rotary base", thetas), ("rope scaling", scalings)):
        if len(set(found.values())) > 1:
            problem = f"{keys.file}: the {what} is given twice and differs"
            raise CheckpointError(problem, got=repr(found), wanted=f"one {what}", change="remove the wrong one")
    theta, scaling = next(iter(thetas.values()), default_theta), next(iter(scalings.values()), None)
    if scaling is not None and scaling.kind == "yarn" and theta <= 1:  # it takes the base's logarithm
        raise keys.refused("rope_theta", "more than 1 with rope type 'yarn'")
    return theta, scaling


def _scaling(key: str, inner: Mapping[str, Any], file: Path, max_position_embeddings: int) -> RopeScaling | None:
    where = f"{file}: rope type"
    names = [inner[name] for name in ("rope_type", "type") if inner.get(name) is not None]
    kind = names[0] if names else "default"
    if not isinstance(kind, str) or kind not in _KEYS or names[-1:] != names[:1]:
        raise CheckpointError(
            f"{where} {kind!r} in {key!r} is not supported",
            got=repr(dict(inner))[:200],
            wanted="rope type " + " | ".join(ROPE_TYPES),
            change="use a model with one of those",
        )
    unknown = sorted(name for name in set(inner) - _COMMON - _KEYS[kind] if inner[name] is not None)
    share = inner.get("partial_rotary_factor")
    if unknown or not (share is None or equal(1.0, share)):
        got = ", ".join(unknown) or f"partial_rotary_factor {share!r}"
        wanted = f"only {', '.join(sorted(_KEYS[kind] | _COMMON))}"
        raise CheckpointError(f"{where} {kind!r} in {key!r} has keys that are not supported", got=got, wanted=wanted)
    keys = Keys(inner, file)
    if kind == "default":
        return None
    original = keys.size("original_max_position_embeddings", default=max_position_embeddings)
    if kind == "dynamic":
        return RopeScaling("dynamic", original_context=original)
    ratio = max_position_embeddings / original if kind == "yarn" else 0.0  # what yarn means by a factor of null
    factor = keys.positive("factor", default=ratio)
    if kind == "linear":
        return RopeScaling("linear", factor, original)
    if kind == "llama3":
        low, high = keys.positive("low_freq_factor", default=0.0), keys.positive("high_freq_factor", default=0.0)
        if high <= low:
            raise keys.refused("high_freq_factor", f"more than low_freq_factor, {low}")
        return RopeScaling("llama3", factor, original, low, high)
    fast, slow = keys.positive("beta_fast", default=32.0), keys.positive("beta_slow", default=1.0)
    if fast < slow:
        raise keys.refused("beta_fast", f"at least beta_slow, {slow}")
    truncate = inner.get("truncate") is None or keys.flag("truncate")
    attention = _yarn_attention_factor(keys, factor)
    return RopeScaling("yarn", factor, original, beta_fast=fast, beta_slow=slow, attention_factor=attention, truncate=truncate)


def _yarn_attention_factor(keys: Keys, factor: float) -> float:
    """As given, or 0.1 ln(factor) + 1; DeepSeek's two weights of the logarithm count where both are given."""
    if keys.raw.get("attention_factor") is not None:
        return keys.positive("attention_factor", default=1.0)
    weights = [keys.raw.get(name) for name in ("mscale", "mscale_all_dim")]
    if all(weights):
        over, under = keys.positive("mscale", default=1.0), keys.positive("mscale_all_dim", default=1.0)
        return _yarn_growth(factor, over) / _yarn_growth(factor, under)
    return _yarn_growth(factor, 1.0)


def _yarn_growth(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rope_from_gguf(keys: Keys, below: str, context_length: int) -> tuple[float, RopeScaling | None]:
    """The rotary base and the scaling of GGUF metadata under "<architecture>."; llama3's stands in a tensor instead.

    Raises:
        CheckpointError: as rope_from_hf.
    """
    theta = keys.positive(below + "rope.freq_base", default=10000.0)
    key = below + "rope.scaling.type"
    legacy = keys.raw.get(below + "rope.scale_linear")
    kind = keys.raw.get(key, "none" if legacy in (None, 0.0, 1.0) else "linear")
    if kind not in GGUF_ROPE_TYPES:
        raise keys.refused(key, " | ".join(GGUF_ROPE_TYPES))
    factor_key = below + ("rope.scaling.factor" if legacy in (None, 0.0) else "rope.scale_linear")
    if kind == "none" or keys.raw.get(factor_key) in (None, 0.0, 1.0):
        if keys.raw.get(factor_key) not in (None, 0.0, 1.0):
            raise keys.refused(factor_key, f"no factor, or a {key} it belongs to")
        return theta, None
    factor = keys.positive(factor_key, default=1.0)
    original = keys.size(below + "rope.scaling.original_context_length", default=context_length)
    if kind == "linear":
        return theta, RopeScaling("linear", factor, original)
    for name, neutral in _GGUF_NEUTRAL.items():
        if keys.raw.get(below + name, neutral[0]) not in neutral:
            raise keys.refused(below + name, " | ".join(map(repr, neutral)))
    attention = keys.positive(below + "rope.scaling.attn_factor", default=1.0) * _yarn_growth(factor, 1.0)
    return theta, RopeScaling("yarn", factor, original, attention_factor=attention)
