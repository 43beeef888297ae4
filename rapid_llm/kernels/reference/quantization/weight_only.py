"""Linear layers with quantised weights in float64."""

import torch


def w8a16_gemm(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ (weight * scales).T (+ bias): [T, K], int8 or e4m3 [N, K], [N] or [N, G] -> float64 [T, N]."""
    return _product(x, weight.float().double(), scales.reshape(weight.shape[0], -1), bias)


def w4a16_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ ((codes - zeros) * scales).T (+ bias): [T, K], uint8 [N, K / 2], [N, G], uint8 or fp32 [N, G] -> float64 [T, N]."""
    codes = torch.stack((weight & 15, weight >> 4), dim=2).flatten(1).double()
    offsets = torch.full_like(scales, 8.0, dtype=torch.float64) if zeros is None else zeros.double()
    return _product(x, codes - _spread(offsets, codes), scales, bias)


def _product(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ (numbers * _spread(scales.double(), numbers)).T
    return product if bias is None else product + bias.double()


def _spread(grouped: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """One value for each element of ``numbers`` [N, K] of the [N, G] that groups have."""
    return grouped.repeat_interleave(numbers.shape[1] // grouped.shape[1], dim=1)
