"""What the rows of quantize_fp8 and fp8_gemm ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe
from rapid_llm.kernels.ops.primitives.scales import GROUP, group_of

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_E4M3 = torch.float8_e4m3fn


def check_quantize_fp8(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, static: bool) -> int:
    """Elements of a row that share a scale. Raises: KernelInputError unless the tensors fit one another."""
    group = group_of(scales, *x.shape) if x.dim() == 2 else 0
    if static:
        group = x.shape[1] if x.dim() == 2 and scales.shape == (1,) else 0
    if (
        not group
        or out.shape != x.shape
        or x.dtype not in _FLOATS
        or out.dtype != _E4M3
        or scales.dtype != torch.float32
        or not (x.device == out.device == scales.device)
        or not (x.stride(1) == out.stride(1) == 1)
    ):
        raise KernelInputError(
            describe("quantize_fp8", x=x, out=out, scales=scales, static=static),
            wanted="x [num_tokens, k] of fp32, bf16 or fp16, out float8_e4m3fn of that shape, inner stride 1, scales fp32 "
            "[num_tokens] or [num_tokens, ceil(k / 128)], or [1] with static=True",
            change="pass views whose last dimension is dense and scales of one of these shapes",
        )
    return group


def check_fp8_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[int, int]:
    """Elements along k that share a scale (k or 128), and outputs that share one (1 or 128).

    Raises: KernelInputError unless the tensors fit one another.
    """
    group, outputs = _scale_layout(x, weight, x_scales, weight_scales) if x.dim() == weight.dim() == 2 else (0, 0)
    if (
        not group
        or weight.shape[1] != x.shape[1]
        or out.shape != (x.shape[0], weight.shape[0])
        or out.dtype not in _FLOATS
        or not (x.dtype == weight.dtype == _E4M3)
        or not (x_scales.dtype == weight_scales.dtype == torch.float32)
        or not (x.device == weight.device == x_scales.device == weight_scales.device == out.device)
        or not (x.stride(1) == weight.stride(1) == out.stride(1) == 1)
        or (bias is not None and not _is_bias(bias, out))
    ):
        raise KernelInputError(
            describe("fp8_gemm", x=x, weight=weight, x_scales=x_scales, weight_scales=weight_scales, out=out, bias=bias),
            wanted="x [num_tokens, k] and weight [n, k] of float8_e4m3fn, x_scales fp32 [1] or [num_tokens] with weight_scales "
            "fp32 [1] or [n], or x_scales [num_tokens, ceil(k / 128)] with weight_scales [ceil(n / 128) or n, ceil(k / 128)], "
            "out [num_tokens, n] of fp32, bf16 or fp16 and bias [n] or None of out's dtype, inner stride 1",
            change="pass both operands as they were quantised, each with the scales of its own groups",
        )
    return group, outputs


def _scale_layout(x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor, weight_scales: torch.Tensor) -> tuple[int, int]:
    """Elements along k and outputs that share a scale; zeros where the scales have other shapes."""
    (num_tokens, k), n = x.shape, weight.shape[0]
    if not k:
        return 0, 0
    groups, of_x, of_weight = -(-k // GROUP), tuple(x_scales.shape), tuple(weight_scales.shape)
    if of_weight in ((1,), (n,), (n, 1), (1, 1)) and (groups == 1 or len(of_x) == 1 or of_x[1:] == (1,)):
        return (k, 1) if of_x in ((1,), (num_tokens,), (num_tokens, 1)) else (0, 0)
    if of_x != (num_tokens, groups) or of_weight not in ((n, groups), (-(-n // GROUP), groups)):
        return 0, 0
    return GROUP, 1 if of_weight[0] == n else GROUP


def _is_bias(bias: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether ``bias`` is one dense value per output."""
    return bias.shape == out.shape[1:] and bias.dtype == out.dtype and bias.device == out.device and bias.stride(0) == 1
