"""Activations in int8 and products of int8 numbers in float64."""

import torch


def quantize_int8(x: torch.Tensor, *, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes -127..127, int64 [T, K], and their scales, fp32 numbers as float64 [T], of x [T, K].

    The quotient is rounded to fp32, then to the nearest integer, ties to the even one. The scale of a token with NaN or an
    infinity is NaN.

    Args:
        scale: the one scale [1] where it is given; it comes back as [T].
    """
    wide = x.double()
    finite = wide.isfinite()
    largest = torch.where(finite, wide.abs(), 0.0).amax(dim=1)
    used = (largest / 127.0).float().clamp(min=torch.finfo(torch.float32).tiny).double()
    told = torch.where(finite.all(dim=1), used, torch.nan)
    if scale is not None:
        used = told = scale.double().expand(x.shape[0])
    quotients = (wide / used[:, None]).float().double().clamp(-127.0, 127.0)
    return torch.where(quotients.isnan(), 0.0, quotients).round().long(), told


def int8_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x @ weight.T) * x_scales * weight_scales (+ bias): int8 [T, K], int8 [N, K], [1] or [T], [N] -> float64 [T, N]."""
    product = x.double() @ weight.double().T * x_scales.double().view(-1, 1) * weight_scales.double().view(-1)
    return product if bias is None else product + bias.double()
