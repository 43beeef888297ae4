"""Compares layers of a loaded model, through the kernels that serve, with float64 products of what the file holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rapid_llm.build import choose_placement, is_head_tied
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.checkpoint.source import CheckpointSource
from rapid_llm.config import EngineConfig
from rapid_llm.kernels.device import current_device
from rapid_llm.models.registry import architecture
from rapid_llm.modules.linear import Linear
from rapid_llm.modules.moe import ExpertStack, MixtureOfExperts
from rapid_llm.modules.placement import Placement
from rapid_llm.quantization.formats import WeightFormat
from rapid_llm.quantization.online import Rounded
from rapid_llm.quantization.packed import Int4Weight, Packed
from rapid_llm.quantization.w8a8 import W8A8
from rapid_llm.runtime.weight_loader import load_weights

_LAYERS = 4  # sampled: the first, the last and some between
_EXPERTS = 3  # of a layer, as well
_TOKENS = 5
# Of the norm of the right result: twice what rounding was seen to cost, of inputs, outputs and sums to a dtype, of weights while
# they are loaded, and of activations to the bytes that they are multiplied in. The codes of a file cost nothing: they are exact.
_OF_DTYPE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}
_OF_WEIGHTS = {"fp8": 6e-2, "int8": 3e-2, "int4": 2.5e-1, "nvfp4": 2e-1}
_OF_ACTIVATIONS = {torch.float8_e4m3fn: 6e-2, torch.int8: 3e-2}
_OF_EXPERT = 2  # times that: three products in a row
_SAME_DIRECTION = 0.9  # cosine
_EMPTY = 0.1  # share of scales that may be 0
_SHIFT = 0.5  # of a step, the mean of all codes less their zero points


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
    place = choose_placement(config, source, current_device(config.device))
    network = architecture(source.config.architecture).load()(
        place, source.config, max_positions=1, tied_head=is_head_tied(source)
    )
    load_weights(source, network.weights())
    for layer in _sampled(network.layers):
        for linear in (layer.attention.qkv, layer.attention.out, *layer.mlp.linears):
            yield _check_linear(linear, source, place)
        if isinstance(layer.mlp, MixtureOfExperts):
            for number in _spread(_EXPERTS, layer.mlp.sizes.num_experts):
                yield _check_expert(layer.mlp, number, source, place)


def _sampled(layers: list[Any]) -> list[Any]:
    return [layers[place] for place in _spread(_LAYERS, len(layers))]


def _spread(most: int, length: int) -> list[int]:
    """At most so many places of a list, the first and the last among them."""
    count = min(most, length)
    return sorted({round(i * (length - 1) / max(count - 1, 1)) for i in range(count)})


@torch.inference_mode()
def _check_linear(linear: Linear, source: CheckpointSource, place: Placement) -> LayerCheck:
    """``linear`` on random activations against the file's values in float64."""
    weights = [_weight(linear.format, source, name) for name, _ in linear.parts]
    x = torch.randn(_TOKENS, weights[0].shape[1], generator=torch.Generator().manual_seed(0))
    if isinstance(linear.weight, W8A8) and linear.weight.x_scale is not None:  # what the file's own scale does not cut off
        x *= float(linear.weight.x_scale) * linear.weight.largest / x.abs().max()
    x = x.to(place.device, place.dtype)
    result = linear(x).double().cpu()
    right = x.double().cpu() @ torch.cat(weights).t()
    if linear.bias is not None:
        right += torch.cat([_stored(source, f"{name}.bias").double() for name, _ in linear.parts])
    problems, start = [], 0
    for (name, size), weight in zip(linear.parts, weights, strict=True):
        problems += _oddities(name, weight)
        if isinstance(linear.weight, Packed):
            problems += _oddities_of_codes(name, linear.weight.part(start, start + size))
        start += size
    return _compared(linear.parts[0][0], _kind(linear, place), _allowed(linear, place), result, right, problems)


@torch.inference_mode()
def _check_expert(mixture: MixtureOfExperts, number: int, source: CheckpointSource, place: Placement) -> LayerCheck:
    """One expert, alone, on random activations: gate, up, SwiGLU and down in one op, against the same in float64."""
    stacks = (mixture.gate_up, mixture.down)
    names = [name for stack in stacks for name in stack.names[number]]
    gate, up, down = weights = [_weight(stack.format, source, name) for stack in stacks for name in stack.names[number]]
    x = torch.randn(_TOKENS, gate.shape[1], generator=torch.Generator().manual_seed(0)).to(place.device, place.dtype)
    result = mixture.expert(x, number).double().cpu()
    wide = x.double().cpu()
    right = (torch.nn.functional.silu(wide @ gate.t()) * (wide @ up.t())) @ down.t()
    problems = [problem for name, weight in zip(names, weights, strict=True) for problem in _oddities(name, weight)]
    for stack in stacks:
        if isinstance(stack.weight, Packed):
            matrix = stack.weight.expert(number)
            for i, name in enumerate(stack.names[number]):
                problems += _oddities_of_codes(name, matrix.part(i * stack.rows, (i + 1) * stack.rows))
    allowed = _OF_EXPERT * max(_allowed(stack, place) for stack in stacks)
    return _compared(names[0], _kind(stacks[0], place), allowed, result, right, problems)


def _kind(layer: Linear | ExpertStack, place: Placement) -> str:
    return place.dtype_name if layer.format is None else layer.format.kind


def _allowed(layer: Linear | ExpertStack, place: Placement) -> float:
    """The error that rounding may make of a layer's result."""
    rounded = _OF_WEIGHTS[layer.format.kind] if isinstance(layer.format, Rounded) else 0.0
    return _OF_DTYPE[place.dtype_name] + rounded + (_OF_ACTIVATIONS[layer.weight.code] if isinstance(layer.weight, W8A8) else 0.0)


def _compared(
    name: str, kind: str, allowed: float, result: torch.Tensor, right: torch.Tensor, problems: Sequence[str]
) -> LayerCheck:
    """The verdict over a layer's result beside the right one."""
    error = float((result - right).norm() / right.norm().clamp_min(1e-30))
    cosine = float(torch.nn.functional.cosine_similarity(result.flatten(), right.flatten(), dim=0))
    found = list(problems)
    if not error <= allowed:
        found.append(f"error above {allowed:.0e}")
        if cosine < _SAME_DIRECTION:
            found.append("another direction: rows, columns or signs are not the file's")
        elif cosine > 1 - allowed**2 / 2:  # what a result of the allowed error has at least
            found.append("the right direction and another size: scales are not the file's")
    return LayerCheck(name, kind, error, cosine, tuple(found))


def _weight(kept: WeightFormat | None, source: CheckpointSource, name: str) -> torch.Tensor:
    """The values of a checkpoint layer in float64, from the file alone."""
    read = partial(_stored, source)
    return read(f"{name}.weight").double() if kept is None else kept.dequantised(read, name)


def _stored(source: CheckpointSource, name: str) -> torch.Tensor:
    """A tensor of the file in the dtype it has there; of blocks the values."""
    values = torch.from_numpy(np.array(source.read(name)))
    raw_bits = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    dtype = source.tensors[name].dtype
    return values.view(raw_bits[dtype]) if dtype in raw_bits else values


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


def _oddities_of_codes(name: str, part: Packed) -> list[str]:
    """What no quantiser of a trained weight leaves, in the tensors of a layer as they were loaded."""
    found = []
    for tensor, values in part.tensors.items():
        if not tensor.endswith("scales"):
            continue
        numbers = values.float()
        broken, empty = int((~numbers.isfinite()).sum()), int((numbers == 0).sum())
        if broken:
            found.append(f"{name} has {broken:,} of {numbers.numel():,} {tensor} that are not numbers")
        if empty > numbers.numel() * _EMPTY:
            found.append(f"{name} has {empty:,} of {numbers.numel():,} {tensor} of 0")
    if isinstance(part, Int4Weight):
        found += _oddities_of_zero_points(name, part)
    return found


def _oddities_of_zero_points(name: str, part: Int4Weight) -> list[str]:
    """Zero points at an end of the codes, or beside the place that values lie around.

    Trained weights lie around 0: their mean is a few hundredths of a step off. Zero points that are stored less one and read
    as they are, or the other way round, shift every value by a whole step.
    """
    zeros = part.tensors.get("zeros")
    if zeros is not None and zeros.dtype == torch.uint8:
        for end in (0, 15):
            if bool((zeros == end).all()):
                return [f"{name} has zero points that are all {end}"]
    steps = part.numbers().view(part.n, -1, part.group) / part.tensors["scales"].float().view(part.n, -1, 1)
    shift = float(steps[steps.isfinite()].mean())
    if abs(shift) > _SHIFT:
        return [f"{name} has values that lie around {shift:.1f} steps, not 0: its zero points may be off by one"]
    return []
