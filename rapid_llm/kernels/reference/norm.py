"""RMS norm in float64."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dimension: [..., d] -> float64 [..., d]."""
    wide = x.double()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return wide / torch.sqrt(mean_square + eps) * weight.double()


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual (x + residual, rounded once to residual's dtype) and its norm, both float64 [T, d]."""
    new_residual = (x.double() + residual.double()).to(residual.dtype)
    return new_residual.double(), rms_norm(new_residual, weight, eps=eps)
