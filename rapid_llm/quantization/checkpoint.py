"""The quantisation config of a checkpoint, and its tensors, to the formats of its layers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rapid_llm.errors import CheckpointError
from rapid_llm.quantization.awq import awq_rule
from rapid_llm.quantization.compressed_tensors import compressed_tensors_rule
from rapid_llm.quantization.formats import FLOATS, CheckpointFormat, CheckpointFormats, Formats, Held, Plain
from rapid_llm.quantization.fp8 import fp8_rule
from rapid_llm.quantization.gptq import gptq_rule
from rapid_llm.quantization.modelopt import modelopt_rule
from rapid_llm.quantization.mxfp4 import mxfp4_rule
from rapid_llm.quantization.settings import Settings

_RULES: Mapping[str, Callable[[Settings, Held], Callable[[str], CheckpointFormat | None]]] = {
    "awq": awq_rule,
    "compressed-tensors": compressed_tensors_rule,
    "fp8": fp8_rule,
    "gptq": gptq_rule,
    "modelopt": modelopt_rule,
    "mxfp4": mxfp4_rule,
}
_PLAIN_LAYERS = ("lm_head", "model.embed_tokens")


def checkpoint_formats(config: Mapping[str, Any] | None, held: Held, file: Path) -> Formats:
    """How each layer of a checkpoint is kept.

    Args:
        config: "quantization_config" of its config.json; None where there is none.
        held: its tensors.
        file: names it in errors.

    Raises: CheckpointError on a format, a setting or a quantised layer that is not served; says what came and what is served.
    """
    if config is None:
        return Plain()
    settings = Settings(config, file)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _RULES:
        raise settings.refused("quant_method", " | ".join(map(repr, sorted(_RULES))))
    rule = _RULES[method](settings, held)
    for layer in _PLAIN_LAYERS:
        _refuse_quantised(layer, held, file)
    return CheckpointFormats(rule, held, file)


def _refuse_quantised(layer: str, held: Held, file: Path) -> None:
    usual = (f"{layer}.weight", f"{layer}.bias")
    mine = [name for name in held if name.startswith(f"{layer}.")]
    found = [name for name in mine if name not in usual or held[name].dtype not in FLOATS]
    if found:
        got, wanted = ", ".join(sorted(found)), f"plain numbers in {layer}.weight"
        change = "use a checkpoint that leaves the embedding and the head out"
        raise CheckpointError(f"{file}: {layer} is quantised, which is not served", got=got, wanted=wanted, change=change)
