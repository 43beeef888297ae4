"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), in the half-split order of the weights."""

import math

import torch

from rapid_llm.models.rope_scaling import RopeScaling
from rapid_llm.modules.placement import Placement


class Rotary:
    """One table of cosines and sines for all layers.

    Attributes:
        cos_sin: [max_positions, rotary_dim] float32, cosines then sines. Angles are products of float32 numbers, as the
            models were trained with.
    """

    def __init__(
        self, place: Placement, *, rotary_dim: int, theta: float, max_positions: int, scaling: RopeScaling | None = None
    ) -> None:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        frequencies = scaled(1.0 / theta**exponents, theta, scaling)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        growth = 1.0 if scaling is None else scaling.attention_factor
        self.cos_sin = (torch.cat((angles.cos(), angles.sin()), dim=1) * growth).to(place.device)
        self.rotary_dim = rotary_dim


def scaled(frequencies: torch.Tensor, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Rotary frequencies [rotary_dim / 2] float32 of base ``theta``, fastest first, stretched as ``scaling`` says."""
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.divisors, dtype=torch.float32)
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    # The share that stays as it is: 1 for fast frequencies, 0 for slow ones.
    kept = _kept_by_llama3(frequencies, scaling) if scaling.kind == "llama3" else _kept_by_yarn(frequencies, theta, scaling)
    return slow * (1 - kept) + frequencies * kept


def _kept_by_llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """A ramp over how often a wave fits into the original context."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    return ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)


def _kept_by_yarn(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """A ramp over dimensions, between those that turn ``beta_fast`` and ``beta_slow`` times within the original context."""
    size = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        return size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001  # a ramp of no width is a step
    return 1 - ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0, 1)
