"""Activations in e4m3 and products of e4m3 numbers in float64."""

import torch

_LARGEST, _LEAST_EXPONENT, _MANTISSA = 448.0, -6, 3


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float64 [...] -> the nearest e4m3 number of each, ties to the even one, as float64; within +-448 or NaN."""
    exponents = (torch.frexp(values).exponent - 1).clamp(min=_LEAST_EXPONENT)
    step = torch.ldexp(torch.ones_like(values), exponents - _MANTISSA)
    return (torch.round(values / step) * step).clamp(-_LARGEST, _LARGEST)


def quantize_fp8(
    x: torch.Tensor, *, group: int | None = None, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 numbers and their scales, fp32 numbers, both as float64: [T, K] -> [T, K], [T, ceil(K / group)].

    The quotient is rounded to fp32, then to e4m3. What is not finite becomes NaN and changes no scale.

    Args:
        group: elements along K that share a scale, all of them if None.
        scale: the one scale [1] where it is given; it comes back as [T, 1].
    """
    wide, k = x.double(), x.shape[1]
    group = group or k
    groups = -(-k // group)
    padded = torch.nn.functional.pad(wide, (0, groups * group - k)).view(x.shape[0], groups, group)
    finite = padded.isfinite()
    largest = torch.where(finite, padded.abs(), 0.0).amax(dim=2)
    scales = (largest / _LARGEST).float().clamp(min=torch.finfo(torch.float32).tiny).double()
    if scale is not None:
        scales = scale.double().expand(x.shape[0], 1)
    quotients = (padded / scales.unsqueeze(2)).float().double().clamp(-_LARGEST, _LARGEST)
    numbers = torch.where(finite, nearest_e4m3(torch.where(finite, quotients, 0.0)), torch.nan)
    return numbers.flatten(1)[:, :k], scales


def fp8_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x * x_scales) @ (weight * weight_scales).T (+ bias): e4m3 [T, K], e4m3 [N, K], scales of elements, rows, 128 columns or
    128 x 128 of them -> float64 [T, N]."""
    product = dequantised(x, x_scales) @ dequantised(weight, weight_scales).T
    return product if bias is None else product + bias.double()


def dequantised(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 values of ``numbers`` [R, K] of any dtype with scales [1], [R], [R, 1], [R, G] or [ceil(R / 128), G]."""
    rows, columns = numbers.shape
    wide = scales.double().reshape(scales.shape[0], -1)
    for dim, size in ((0, rows), (1, columns)):
        if wide.shape[dim] not in (1, size):
            wide = wide.repeat_interleave(128, dim=dim).narrow(dim, 0, size)
    return numbers.float().double() * wide
