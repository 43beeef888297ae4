"""Linear layers of e4m3 numbers through the vendor's library, as torch calls it; for devices that have them in hardware."""

import torch

from rapid_llm.kernels.ops.fallback.quantization.fp8 import fp8_gemm as plain_fp8_gemm
from rapid_llm.kernels.ops.quantization.fp8_inputs import check_fp8_gemm

_ALIGNED = 16  # bytes that the library asks of every address and, as sizes, of n and k


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

    The library multiplies dense matrices on addresses of 16 bytes that have one scale, or one a token and one an output. What
    else the op allows goes the way of plain torch.

    Args:
        x: [num_tokens, k], float8_e4m3fn; inner stride 1, row stride free.
        weight: [n, k], float8_e4m3fn; inner stride 1, row stride free.
        x_scales: fp32, any strides: [1]; [num_tokens] (or [num_tokens, 1]); or [num_tokens, ceil(k / 128)].
        weight_scales: fp32, any strides: [1] or [n] (or [n, 1]); beside an x scale for each 128 of k, [ceil(n / 128),
            ceil(k / 128)] or [n, ceil(k / 128)].
        out: [num_tokens, n], bf16 (fp32 and fp16 go the way of plain torch), same device, apart from x; inner stride 1, row
            stride free.
        bias: [n], dtype of out, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/quantization/fp8.py::fp8_gemm. Origin: this repo.
    """
    layout = check_fp8_gemm(x, weight, x_scales, weight_scales, out, bias)
    (num_tokens, k), n = x.shape, weight.shape[0]
    if not num_tokens or not n:
        return out
    matrices = (x, weight, out)
    if (
        layout != (k, 1)
        or k % _ALIGNED
        or n % _ALIGNED
        or out.dtype != torch.bfloat16
        or not all(matrix.is_contiguous() for matrix in matrices)
        or any(tensor.data_ptr() % _ALIGNED for tensor in (*matrices, *(() if bias is None else (bias,))))
    ):
        return plain_fp8_gemm(x, weight, x_scales, weight_scales, out=out, bias=bias)
    if x_scales.numel() == weight_scales.numel() == 1:
        of_x, of_weight = x_scales.view(1), weight_scales.view(1)
    else:
        of_x, of_weight = _dense(x_scales, num_tokens).view(-1, 1), _dense(weight_scales, n).view(1, -1)
    return torch._scaled_mm(x, weight.t(), of_x, of_weight, bias, out_dtype=out.dtype, use_fast_accum=False, out=out)


def _dense(scales: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` scales one after another: these, or as many as are needed of the one for all."""
    if scales.numel() == count and scales.stride(0) == 1:
        return scales.view(-1)
    return torch.empty(count, dtype=torch.float32, device=scales.device).copy_(scales.view(-1))
