"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), in the half-split order of the weights."""

import torch

from rapid_llm.modules.placement import Placement


class Rotary:
    """One table of cosines and sines for all layers.

    Attributes:
        cos_sin: [max_positions, rotary_dim] float32, cosines then sines. Angles are products of float32 numbers, as the
            models were trained with.
    """

    def __init__(self, place: Placement, *, rotary_dim: int, theta: float, max_positions: int) -> None:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), 1.0 / theta**exponents)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(place.device)
        self.rotary_dim = rotary_dim
