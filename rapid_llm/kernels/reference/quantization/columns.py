"""Columns in another order, in float64."""

import torch


def gather_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Column order[j] of x as column j: [T, k], [k] -> float64 [T, k]."""
    return torch.stack([x[:, column].double() for column in order.tolist()], dim=1)
