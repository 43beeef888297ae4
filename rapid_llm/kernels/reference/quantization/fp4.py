"""4-bit floating-point weights in float64: their products and their quantiser."""

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 stand for; bit 3 is the sign."""


def nvfp4_gemm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, global_scales: torch.Tensor, *, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ (e2m1 * e4m3 * fp32).T (+ bias): [T, K], uint8 [N, K / 2], e4m3 [N, K / 16], fp32 [N] -> float64 [T, N]."""
    return _product(x, weight, scales.float().double() * global_scales.double()[:, None], bias)


def mxfp4_gemm(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ (e2m1 * 2 ** (scales - 127)).T (+ bias): [T, K], uint8 [N, K / 2], uint8 [N, K / 32] -> float64 [T, N]."""
    powers = torch.exp2(scales.double() - 127)
    return _product(x, weight, torch.where(scales == 255, torch.nan, powers), bias)


def quantize_nvfp4(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e2m1 codes, two a byte, and e4m3 scales: [T, K], fp32 [1] -> uint8 [T, K / 2], e4m3 [T, K / 16].

    A scale is the e4m3 number nearest to amax / 6 / global, ties to even, but at least the smallest above 0 and at most 448; NaN
    where the group holds one. A code is the e2m1 number nearest to x / scale / global, ties to even, at most 6 in size; that of
    what is not below 0 has no sign.
    """
    groups = x.double().reshape(x.shape[0], x.shape[1] // 16, 16)
    every_e4m3 = torch.arange(127, dtype=torch.uint8, device=x.device).view(torch.float8_e4m3fn).float().double()
    wanted = groups.abs().amax(2) / 6 / global_scale.double()
    picked = torch.where(wanted.isnan(), 127, _nearest_even(wanted, every_e4m3).clamp(min=1))
    scales = picked.to(torch.uint8).view(torch.float8_e4m3fn)
    steps = (scales.float().double() * global_scale.double())[:, :, None]
    sizes = _nearest_even((groups / steps).abs(), torch.tensor(E2M1, dtype=torch.float64, device=x.device))
    codes = torch.where(steps.isnan(), 0, sizes) + 8 * (groups < 0)
    flat = codes.flatten(1)
    return (flat[:, 0::2] + 16 * flat[:, 1::2]).to(torch.uint8), scales


def _nearest_even(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The place in ``table``, which ascends, of what is nearest to each value; the even one of two that are as near."""
    middles = (table[1:] + table[:-1]) / 2
    below, above = (torch.bucketize(values.contiguous(), middles, right=right) for right in (False, True))
    return torch.where(below % 2 == 0, below, above)


def _product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    codes = torch.stack((weight & 15, weight >> 4), dim=2).flatten(1).long()
    numbers = torch.tensor(E2M1, dtype=torch.float64, device=x.device)[codes & 7] * (1 - (codes >> 3) * 2)
    product = x.double() @ (numbers * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], dim=1)).T
    return product if bias is None else product + bias.double()
