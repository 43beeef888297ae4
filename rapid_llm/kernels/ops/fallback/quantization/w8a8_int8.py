"""Activations in int8 and products of int8 numbers in plain torch."""

import torch

from rapid_llm.kernels.ops.quantization.w8a8_int8_inputs import check_int8_gemm, check_quantize_int8

LARGEST = 127.0
"""Of codes: -128 is not used, so that a value and its negative round alike."""

_CHUNK = 1 << 20  # elements of the weight that are fp32 at one time: 4 MiB, which a CPU's cache holds until they are multiplied
_EXACT = 1024  # products of int8 whose sum is exact in fp32, whatever they are: 2**10 * 2**14


def quantize_int8(x: torch.Tensor, *, out: torch.Tensor, scales: torch.Tensor, static: bool = False) -> torch.Tensor:
    """Write x / scale, divided in fp32, rounded to the nearest of -127..127, into ``out`` and return it; scales into ``scales``.

    A scale is the token's largest finite magnitude / 127, at least the least normal fp32 number: zeros get that and stay zeros.
    Values past +-127 scales become +-127, infinities too, and NaN becomes 0. int8 has no code for either, so the scale of a
    token that has one is NaN, and so is all that the token is multiplied with; a given scale cannot tell of them.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        out: [num_tokens, k], int8, same device; inner stride 1, row stride free.
        scales: fp32, any stride: [num_tokens] (or [num_tokens, 1]); or, with ``static``, [1].
        static: the scale is given, and positive: it is read.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/quantization/w8a8_int8.py::quantize_int8. Origin: Xiao et al. 2022, https://arxiv.org/abs/2211.10438.
    """
    check_quantize_int8(x, out, scales, static)
    if not x.shape[0]:
        return out
    values, flat = x.to(torch.float32), scales.view(-1)
    scale = flat
    if not static:
        magnitudes = values.abs()
        finite = magnitudes < torch.inf
        largest = torch.where(finite, magnitudes, 0.0).amax(dim=1)
        # Divided by a tensor: on a GPU torch multiplies by the reciprocal of a number.
        scale = largest.div_(torch.full_like(largest, LARGEST)).clamp_(min=torch.finfo(torch.float32).tiny)
        flat.copy_(torch.where(finite.all(dim=1), scale, torch.nan))
    quotients = (values / scale.view(-1, 1)).clamp_(-LARGEST, LARGEST).round_()
    out.copy_(torch.where(values == values, quotients, 0.0))
    return out


def int8_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write (x @ weight.T) * x_scales * weight_scales (+ bias) into ``out`` and return it; the sum over k is exact.

    Args:
        x: [num_tokens, k], int8; inner stride 1, row stride free. k is at most 131,071, so that sums stay within int32.
        weight: [n, k], int8; inner stride 1, row stride free.
        x_scales: fp32, any stride: [1] or [num_tokens] (or [num_tokens, 1]).
        weight_scales: fp32, any stride: [n] (or [n, 1]).
        out: [num_tokens, n], fp32 | bf16 | fp16, same device; inner stride 1, row stride free.
        bias: [n], dtype of out, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/quantization/w8a8_int8.py::int8_gemm. Origin: Xiao et al. 2022, https://arxiv.org/abs/2211.10438.
    """
    check_int8_gemm(x, weight, x_scales, weight_scales, out, bias)
    (num_tokens, k), n = x.shape, weight.shape[0]
    if not num_tokens:
        return out
    wide = x.to(torch.float32)
    rows = max(_CHUNK // k, 1)
    for start in range(0, n, rows):
        chunk = slice(start, min(start + rows, n))
        part = weight[chunk].to(torch.float32)
        total = torch.mm(wide[:, :_EXACT], part[:, :_EXACT].t())
        if k > _EXACT:
            whole = total.to(torch.int32)
            for first in range(_EXACT, k, _EXACT):
                within = slice(first, first + _EXACT)
                whole += torch.mm(wide[:, within], part[:, within].t()).to(torch.int32)
            total = whole.to(torch.float32)
        total.mul_(x_scales.view(-1, 1)).mul_(weight_scales.view(-1)[chunk])
        if bias is not None:
            total.add_(bias[chunk])
        out[:, chunk] = total
    return out
