"""What the rows of w8a16_gemm and w4a16_gemm ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_GROUP = 16  # the least depth of a matrix instruction
_MOST_GROUP = 1024  # of 4-bit codes; a group may also be all of k
_BYTES = (torch.int8, torch.float8_e4m3fn)


def check_w8a16_gemm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> int:
    """The group size, which is k where an output has one scale. Raises: KernelInputError unless the tensors fit one another."""
    group = _group(scales, weight.shape[1]) if weight.dim() == 2 else 0
    if (
        not _fits(x, weight, out, bias)
        or weight.shape[1] != x.shape[1]
        or weight.dtype not in _BYTES
        or not group
        or scales.shape[0] != weight.shape[0]
        or scales.dtype != torch.float32
        or scales.device != x.device
    ):
        raise KernelInputError(
            describe("w8a16_gemm", x=x, weight=weight, scales=scales, out=out, bias=bias),
            wanted="x [num_tokens, k] of fp32, bf16 or fp16, weight [n, k] of int8 or float8_e4m3fn, scales fp32 [n] or "
            "[n, k / group] with a group that divides k and is a power of two from 16 on, out [num_tokens, n] and bias [n] "
            "or None of x's dtype, inner stride 1",
            change="pass the weight as it was quantised, with the scales of its own groups",
        )
    return group


def check_w4a16_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> int:
    """The group size, which is k where an output has one scale. Raises: KernelInputError unless the tensors fit one another."""
    group = _group(scales, 2 * weight.shape[1], _MOST_GROUP) if weight.dim() == 2 and scales.dim() == 2 else 0
    if (
        not _fits(x, weight, out, bias)
        or 2 * weight.shape[1] != x.shape[1]
        or weight.dtype != torch.uint8
        or not group
        or scales.shape[0] != weight.shape[0]
        or scales.dtype not in (x.dtype, torch.float32)
        or scales.device != x.device
        or (zeros is not None and not _are_zeros(zeros, scales))
    ):
        raise KernelInputError(
            describe("w4a16_gemm", x=x, weight=weight, scales=scales, out=out, zeros=zeros, bias=bias),
            wanted="x [num_tokens, k] of fp32, bf16 or fp16, weight uint8 [n, k / 2], scales [n, k / group] of x's dtype or fp32 "
            "with a group that divides k and is a power of two from 16 to 1024, or is k, zeros uint8 or fp32 [n, k / group] "
            "or None, out [num_tokens, n] and bias [n] or None of x's dtype, inner stride 1",
            change="pass two codes a byte, the even one in the low half, with scales and zeros of the same groups",
        )
    return group


def _group(scales: torch.Tensor, k: int, most: int | None = None) -> int:
    """Elements along k that share a scale; 0 where no such groups can be."""
    if scales.dim() == 1:
        return k
    if scales.dim() != 2 or scales.stride(1) != 1 or not scales.shape[1] or k % scales.shape[1]:
        return 0
    group = k // scales.shape[1]
    if group == k:
        return k
    within = group >= _LEAST_GROUP and (most is None or group <= most)
    return group if within and not group & (group - 1) else 0


def _fits(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether activations, outputs and bias fit the weight's outputs, and every inner stride is 1."""
    return (
        x.dim() == weight.dim() == out.dim() == 2
        and x.shape[1] > 0
        and out.shape == (x.shape[0], weight.shape[0])
        and x.dtype in _FLOATS
        and x.dtype == out.dtype
        and x.device == weight.device == out.device
        and x.stride(1) == weight.stride(1) == out.stride(1) == 1
        and (bias is None or _is_bias(bias, out))
    )


def _is_bias(bias: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether ``bias`` is one dense value per output."""
    return bias.shape == out.shape[1:] and bias.dtype == out.dtype and bias.device == out.device and bias.stride(0) == 1


def _are_zeros(zeros: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether ``zeros`` has a code, or a number in place of one, for each scale."""
    of_a_kind = zeros.dtype in (torch.uint8, torch.float32)
    return of_a_kind and zeros.shape == scales.shape and zeros.device == scales.device and zeros.stride(1) == 1
