"""Rotary position embedding in float64."""

import torch


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k with every pair (i, i + rotary_dim / 2) turned by its angle: float64 [T, H, D] each."""
    table = cos_sin.double()[positions.long()]  # [T, R]
    return _turned(q, table), _turned(k, table)


def _turned(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    result = x.double().clone()
    half = table.shape[1] // 2
    for i in range(half):
        cos, sin = table[:, i, None], table[:, half + i, None]  # [T, 1]
        first, second = x[:, :, i].double(), x[:, :, half + i].double()
        result[:, :, i] = first * cos - second * sin
        result[:, :, half + i] = second * cos + first * sin
    return result
