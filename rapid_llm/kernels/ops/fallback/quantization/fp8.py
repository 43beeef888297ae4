"""Activations in e4m3 and products of e4m3 numbers in plain torch."""

import torch

from rapid_llm.kernels.ops.primitives.scales import GROUP
from rapid_llm.kernels.ops.quantization.fp8_inputs import check_fp8_gemm, check_quantize_fp8

LARGEST = 448.0
"""Of e4m3."""

_CHUNK = 1 << 20  # elements of the weight that are fp32 at one time: 4 MiB, which a CPU's cache holds until they are multiplied


def quantize_fp8(x: torch.Tensor, *, out: torch.Tensor, scales: torch.Tensor, static: bool = False) -> torch.Tensor:
    """Write x / scale, divided in fp32 and rounded to the nearest e4m3, into ``out`` and return it; the scales into ``scales``.

    A scale is the largest finite magnitude that it stands for / 448, at least the least normal fp32 number: zeros get that and
    stay zeros. Finite values past +-448 scales become +-448. NaN stays NaN, and so does an infinity, which e4m3 has not; neither
    changes a scale.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        out: [num_tokens, k], float8_e4m3fn, same device; inner stride 1, row stride free.
        scales: fp32, any strides: [num_tokens] (or [num_tokens, 1]), one a token; [num_tokens, ceil(k / 128)], one for each 128
            of k; or, with ``static``, [1].
        static: the scale is given, and positive: it is read.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/quantization/fp8.py::quantize_fp8. Origin: this repo.
    """
    group = check_quantize_fp8(x, out, scales, static)
    if x.shape[0]:
        encode(x.to(torch.float32), out, scales, group, given=static)
    return out


def encode(values: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, group: int, *, given: bool = False) -> None:
    """``values`` fp32 [rows, columns] into ``out`` and ``scales`` as quantize_fp8 does it; ``group`` elements share a scale."""
    columns = values.shape[1]
    if given or group == columns:
        _encode(values, out, scales.reshape(-1), given)
        return
    whole = columns // group * group
    if whole:
        parts = (-1, whole // group, group)
        _encode(values[:, :whole].view(parts), out[:, :whole].view(parts), scales[:, : parts[1]], given)
    if whole != columns:
        _encode(values[:, whole:], out[:, whole:], scales[:, -1], given)


def _encode(values: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, given: bool) -> None:
    """``values`` [..., size] into ``out`` [..., size] by ``scales`` [...], which are written unless they are given."""
    magnitudes = values.abs()
    finite = magnitudes < torch.inf
    if not given:
        largest = torch.where(finite, magnitudes, 0.0).amax(dim=-1)
        # Divided by a tensor: on a GPU torch multiplies by the reciprocal of a number.
        scales.copy_(largest.div_(torch.full_like(largest, LARGEST)).clamp_(min=torch.finfo(torch.float32).tiny))
    quotients = (values / scales.unsqueeze(-1)).clamp_(-LARGEST, LARGEST)
    out.copy_(torch.where(finite, quotients, torch.nan))


def fp8_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write (x * x_scales) @ (weight * weight_scales).T (+ bias), accumulated in fp32, into ``out`` and return it.

    Args:
        x: [num_tokens, k], float8_e4m3fn; inner stride 1, row stride free.
        weight: [n, k], float8_e4m3fn; inner stride 1, row stride free.
        x_scales: fp32, any strides: [1]; [num_tokens] (or [num_tokens, 1]); or [num_tokens, ceil(k / 128)].
        weight_scales: fp32, any strides: [1] or [n] (or [n, 1]); beside an x scale for each 128 of k, [ceil(n / 128),
            ceil(k / 128)] or [n, ceil(k / 128)].
        out: [num_tokens, n], fp32 | bf16 | fp16, same device, apart from x; inner stride 1, row stride free.
        bias: [n], dtype of out, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/quantization/fp8.py::fp8_gemm. Origin: this repo.
    """
    group, outputs = check_fp8_gemm(x, weight, x_scales, weight_scales, out, bias)
    (num_tokens, k), n = x.shape, weight.shape[0]
    if not num_tokens:
        return out
    grouped = (group, outputs) != (k, 1)
    values = torch.arange(256, dtype=torch.uint8, device=x.device).view(torch.float8_e4m3fn).to(torch.float32)
    wide = _numbers(x, values)
    if grouped:
        wide *= _spread(x_scales, k)
    rows = max(_CHUNK // k // GROUP, 1) * GROUP  # whole blocks of outputs
    for start in range(0, n, rows):
        chunk = slice(start, min(start + rows, n))
        part = _numbers(weight[chunk], values)
        if grouped:
            scales = weight_scales[start // outputs : -(-chunk.stop // outputs)]
            part *= _spread(scales, k).repeat_interleave(outputs, dim=0)[: part.shape[0]]
        product = torch.mm(wide, part.t())
        if not grouped:
            product.mul_(x_scales.view(-1, 1)).mul_(weight_scales.view(-1).expand(n)[chunk])
        if bias is not None:
            product.add_(bias[chunk])
        out[:, chunk] = product
    return out


def _numbers(codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """e4m3 numbers as fp32, looked up: torch's own conversion on a CPU takes longer."""
    return values.index_select(0, codes.view(torch.uint8).reshape(-1).to(torch.int32)).view(codes.shape)


def _spread(scales: torch.Tensor, k: int) -> torch.Tensor:
    """One scale for each element of k of the [rows, groups] that groups have."""
    return scales.repeat_interleave(GROUP, dim=1)[:, :k]
