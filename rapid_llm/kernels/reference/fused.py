"""Norms and activations that end in e4m3, in float64, up to the rounding to e4m3."""

import torch

from rapid_llm.kernels.reference.activation import swiglu
from rapid_llm.kernels.reference.norm import add_rms_norm


def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new residual as add_rms_norm has it, its norm in units of the scales, the scales: [T, d] twice, [T, d / group]."""
    new_residual, norm = add_rms_norm(x, residual, weight, eps=eps)
    return new_residual, *scaled(norm, group)


def swiglu_fp8(gate_up: torch.Tensor, *, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of a fused row [T, 2 * d] in units of the scales, and those: [T, d], [T, ceil(d / group)]."""
    return scaled(swiglu(gate_up), group)


def scaled(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``values`` float64 [T, d], NaN where they are not finite, over their scales: largest magnitude of each group / 448."""
    tokens, d = values.shape
    groups = -(-d // group)
    padded = torch.nn.functional.pad(values, (0, groups * group - d)).view(tokens, groups, group)
    finite = torch.where(padded.isfinite(), padded, torch.nan)
    scales = (finite.nan_to_num(0.0).abs().amax(dim=2) / 448.0).clamp(min=torch.finfo(torch.float32).tiny)
    return (finite / scales.unsqueeze(2)).flatten(1)[:, :d], scales
