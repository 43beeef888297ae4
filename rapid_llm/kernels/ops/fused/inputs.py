"""What the rows of add_rms_norm_fp8 and swiglu_fp8 ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe
from rapid_llm.kernels.ops.primitives.scales import group_of

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: torch.Tensor
) -> int:
    """Elements of a row that share a scale. Raises: KernelInputError unless the tensors fit one another."""
    group = _group(out, scales)
    if (
        not group
        or not (x.shape == residual.shape == out.shape)
        or weight.shape != x.shape[1:]
        or x.dtype not in _FLOATS
        or not (x.dtype == residual.dtype == weight.dtype)
        or not (x.device == residual.device == weight.device == out.device)
        or not (x.stride(1) == residual.stride(1) == weight.stride(0) == 1)
    ):
        raise KernelInputError(
            describe("add_rms_norm_fp8", x=x, residual=residual, weight=weight, out=out, scales=scales),
            wanted="x and residual [num_tokens, d] and weight [d] of one float dtype, out float8_e4m3fn [num_tokens, d], inner "
            "stride 1, scales fp32 [num_tokens] or [num_tokens, ceil(d / 128)]",
            change="pass views whose last dimension is dense, a weight of that width and scales of one of these shapes",
        )
    return group


def check_swiglu_fp8(gate_up: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> int:
    """Elements of a row that share a scale. Raises: KernelInputError unless the tensors fit one another."""
    group = _group(out, scales)
    if (
        not group
        or gate_up.shape != (out.shape[0], 2 * out.shape[1])
        or gate_up.dtype not in _FLOATS
        or gate_up.device != out.device
        or gate_up.stride(1) != 1
    ):
        raise KernelInputError(
            describe("swiglu_fp8", gate_up=gate_up, out=out, scales=scales),
            wanted="gate_up [num_tokens, 2 * d] of fp32, bf16 or fp16, out float8_e4m3fn [num_tokens, d], inner stride 1, scales "
            "fp32 [num_tokens] or [num_tokens, ceil(d / 128)]",
            change="pass the fused gate-up projection, a buffer of half its width and scales of one of these shapes",
        )
    return group


def _group(out: torch.Tensor, scales: torch.Tensor) -> int:
    """Elements of a row of ``out`` that share a scale; 0 where numbers and scales are not such."""
    fits = out.dim() == 2 and out.dtype == torch.float8_e4m3fn and out.stride(1) == 1
    return group_of(scales, *out.shape) if fits and scales.dtype == torch.float32 and scales.device == out.device else 0
