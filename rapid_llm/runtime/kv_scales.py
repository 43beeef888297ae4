"""Scales of an e4m3 KV pool, one a layer and KV head, and those that a checkpoint gives (``kv_calibration.py`` measures them)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rapid_llm.checkpoint.source import CheckpointSource
from rapid_llm.errors import CheckpointError
from rapid_llm.models.config import ModelConfig

_CHANGE = "fetch the checkpoint again, or leave kv_dtype out"
# Of compressed-tensors, and of ModelOpt.
_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([kv])_proj\.)?([kv])_scale")


@dataclass(frozen=True)
class KVScales:
    """What the numbers of each layer's pool are multiplied by, fp32 [num_layers, num_kv_heads] each.

    ``origin`` says where they are from, for the start's ledger.
    """

    k: torch.Tensor
    v: torch.Tensor
    origin: str

    def by_layer(self, device: torch.device) -> list[dict[str, torch.Tensor]]:
        """Of each layer, as kernels take them: on ``device``, each by itself, so that all lie at addresses of one kind."""
        k, v = self.k.to(device), self.v.to(device)
        return [{"k_scale": k_scale.clone(), "v_scale": v_scale.clone()} for k_scale, v_scale in zip(k, v, strict=True)]


def unit_scales(model: ModelConfig) -> KVScales:
    """All 1: for a pool whose numbers nobody looks at."""
    ones = torch.ones(model.num_layers, model.num_kv_heads)
    return KVScales(ones, ones, "none")


def given_scales(source: CheckpointSource) -> KVScales | None:
    """The checkpoint's own, of tensors (then all heads have it) or of heads; None where it has none, or not for e4m3.

    Raises:
        CheckpointError: scales of some layers only, of another number than one or the heads', or that are no positive numbers.
    """
    model = source.config
    found = _named(source) if _is_e4m3(model.quantization or {}) else {}
    if not found:
        return None
    wanted = [(layer, which) for layer in range(model.num_layers) for which in "kv"]
    missing = [f"{which}_scale of layer {layer}" for layer, which in wanted if (layer, which) not in found]
    if missing:
        change = "leave kv_dtype out, or use a checkpoint that has them all"
        raise CheckpointError(f"{source.path}: scales of the KV cache are missing", got=", ".join(missing[:8]), change=change)
    stacked = {which: torch.stack([found[layer, which] for layer in range(model.num_layers)]) for which in "kv"}
    return KVScales(stacked["k"], stacked["v"], "the checkpoint's scales")


def _is_e4m3(quantization: Mapping[str, Any]) -> bool:
    """Whether scales of a KV cache, if there are any, are of e4m3, as far as the config tells."""
    nested = quantization.get("quantization")
    algorithm = (nested if isinstance(nested, Mapping) else quantization).get("kv_cache_quant_algo")
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and (scheme.get("type", "float"), scheme.get("num_bits", 8)) != ("float", 8):
        return False
    return algorithm in (None, "FP8")


def _named(source: CheckpointSource) -> dict[tuple[int, str], torch.Tensor]:
    """fp32 [num_kv_heads] by layer and "k" or "v"."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    heads = source.config.num_kv_heads
    for name, values in source.kv_scales().items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in (None, match[3]):
            continue
        scale = torch.from_numpy(values).float().flatten()
        if scale.numel() not in (1, heads):
            got, wanted = f"{list(values.shape)}", f"one number, or one for each of {heads} KV heads"
            raise CheckpointError(f"{source.path}: {name} has another shape", got=got, wanted=wanted, change=_CHANGE)
        bad = ~(scale.isfinite() & (scale > 0))
        if bool(bad.any()):
            got, wanted = f"{float(scale[bad][0])}", "numbers above 0"
            raise CheckpointError(f"{source.path}: {name} is no scale", got=got, wanted=wanted, change=_CHANGE)
        found[int(match[1]), match[3]] = scale.expand(heads).clone()
    return found
