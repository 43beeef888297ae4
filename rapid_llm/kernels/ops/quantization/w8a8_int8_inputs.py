"""What the rows of quantize_int8 and int8_gemm ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOST_K = (2**31 - 1) // 128**2  # terms of at most 128 * 128 whose sum is an int32


def check_quantize_int8(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, static: bool) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        x.dim() != 2
        or not x.shape[1]
        or out.shape != x.shape
        or tuple(scales.shape) not in (((1,),) if static else ((x.shape[0],), (x.shape[0], 1)))
        or x.dtype not in _FLOATS
        or out.dtype != torch.int8
        or scales.dtype != torch.float32
        or not (x.device == out.device == scales.device)
        or not (x.stride(1) == out.stride(1) == 1)
    ):
        raise KernelInputError(
            describe("quantize_int8", x=x, out=out, scales=scales, static=static),
            wanted="x [num_tokens, k] of fp32, bf16 or fp16, out int8 of that shape, inner stride 1, scales fp32 [num_tokens], "
            "or [1] with static=True",
            change="pass views whose last dimension is dense and one scale a token",
        )


def check_int8_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        not (x.dim() == weight.dim() == 2)
        or not 0 < x.shape[1] <= _MOST_K
        or weight.shape[1] != x.shape[1]
        or out.shape != (x.shape[0], weight.shape[0])
        or tuple(x_scales.shape) not in ((1,), (x.shape[0],), (x.shape[0], 1))
        or tuple(weight_scales.shape) not in ((weight.shape[0],), (weight.shape[0], 1))
        or out.dtype not in _FLOATS
        or not (x.dtype == weight.dtype == torch.int8)
        or not (x_scales.dtype == weight_scales.dtype == torch.float32)
        or not (x.device == weight.device == x_scales.device == weight_scales.device == out.device)
        or not (x.stride(1) == weight.stride(1) == out.stride(1) == 1)
        or (bias is not None and not _is_bias(bias, out))
    ):
        raise KernelInputError(
            describe("int8_gemm", x=x, weight=weight, x_scales=x_scales, weight_scales=weight_scales, out=out, bias=bias),
            wanted=f"x [num_tokens, k] and weight [n, k] of int8 with k up to {_MOST_K:,}, x_scales fp32 [1] or [num_tokens], "
            "weight_scales fp32 [n], out [num_tokens, n] of fp32, bf16 or fp16 and bias [n] or None of out's dtype, inner "
            "stride 1",
            change="pass both operands as they were quantised, one scale a token and one an output",
        )


def _is_bias(bias: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether ``bias`` is one dense value per output."""
    return bias.shape == out.shape[1:] and bias.dtype == out.dtype and bias.device == out.device and bias.stride(0) == 1
