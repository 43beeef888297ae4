"""Compares layers of a loaded model, through the kernels that serve, with float64 products of what the file holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rapid_llm.build import choose_placement, is_head_tied
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.checkpoint.source import CheckpointSource
from rapid_llm.config import EngineConfig
from rapid_llm.models.registry import architecture
from rapid_llm.modules.linear import Linear
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.weight_loader import load_weights

_LAYERS = 4  # sampled: the first, the last and some between
_TOKENS = 5
# Of the norm of the right result: twice what rounding of inputs, weights and sums was seen to cost.
_ALLOWED = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3, "int8": 3e-2, "int4": 2.5e-1}


@dataclass(frozen=True)
class LayerCheck:
    """One layer's comparison.

    Attributes:
        name: its checkpoint tensors, the first of them.
        kind: how its weight is kept.
        error: norm of the difference over the norm of the right result; NaN where either is.
        cosine: of the two results: near 1, or the directions are wrong.
        problems: what is wrong; empty when nothing is.
    """

    name: str
    kind: str
    error: float
    cosine: float
    problems: tuple[str, ...]

    def to_text(self) -> str:
        """One line."""
        verdict = "; ".join(self.problems) or "ok"
        return f"{self.name:<42} {self.kind:<9} error {self.error:8.2e}  cosine {self.cosine:.6f}  {verdict}"


def check_checkpoint(path: Path, config: EngineConfig) -> Iterator[LayerCheck]:
    """Load a model as an engine would and check its sampled layers, one after the other.

    Raises: ConfigError and CheckpointError as a start would.
    """
    source = open_checkpoint(path)
    place = choose_placement(config, source)
    network = architecture(source.config.architecture).load()(
        place, source.config, max_positions=1, tied_head=is_head_tied(source)
    )
    load_weights(source, network.weights())
    for layer in _sampled(network.layers):
        for linear in (layer.attention.qkv, layer.attention.out, *layer.mlp.linears):
            yield _check_linear(linear, source, place)


def _sampled(layers: list[Any]) -> list[Any]:
    count = min(_LAYERS, len(layers))
    places = {round(i * (len(layers) - 1) / max(count - 1, 1)) for i in range(count)}
    return [layers[place] for place in sorted(places)]


@torch.inference_mode()
def _check_linear(linear: Linear, source: CheckpointSource, place: Placement) -> LayerCheck:
    """``linear`` on random activations against the file's values in float64."""
    weights = [_numbers(source, f"{name}.weight") for name, _ in linear.parts]
    width = weights[0].shape[1]
    x = torch.randn(_TOKENS, width, generator=torch.Generator().manual_seed(0)).to(place.device, place.dtype)
    result = linear(x).double().cpu()
    right = x.double().cpu() @ torch.cat(weights).t()
    if linear.bias is not None:
        right += torch.cat([_numbers(source, f"{name}.bias") for name, _ in linear.parts])
    error = float((result - right).norm() / right.norm().clamp_min(1e-30))
    cosine = float(torch.nn.functional.cosine_similarity(result.flatten(), right.flatten(), dim=0))
    kind = place.dtype_name if linear.format is None else linear.format.kind
    problems = [problem for (name, _), weight in zip(linear.parts, weights, strict=True) for problem in _oddities(name, weight)]
    if not error <= _ALLOWED[kind]:
        problems.append(f"error above {_ALLOWED[kind]:.0e}")
    return LayerCheck(linear.parts[0][0], kind, error, cosine, tuple(problems))


def _numbers(source: CheckpointSource, name: str) -> torch.Tensor:
    """A tensor of the file in float64."""
    values = source.read(name)
    if values.dtype == np.uint16:  # bfloat16, as raw bits
        return torch.from_numpy(values.copy()).view(torch.bfloat16).double()
    return torch.from_numpy(np.asarray(values, np.float64))


def _oddities(name: str, weight: torch.Tensor) -> list[str]:
    """What no trained weight shows."""
    found = []
    broken = int((~weight.isfinite()).sum())
    if broken:
        found.append(f"{name} holds {broken:,} values that are not numbers")
    zero_rows = int((weight == 0).all(1).sum())
    if zero_rows > len(weight) // 2:
        found.append(f"{name} has {zero_rows:,} of {len(weight):,} rows of zeros")
    return found
