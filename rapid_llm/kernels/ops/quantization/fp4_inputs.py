"""What the rows of nvfp4_gemm, mxfp4_gemm and quantize_nvfp4 ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe
from rapid_llm.kernels.ops.quantization.fp4_rows import MXFP4_GROUP, NVFP4_GROUP

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WORD = 4  # bytes of a weight that are read at once


def check_nvfp4_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    global_scales: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        not _fits(x, weight, out, bias)
        or not _are_scales(scales, weight, NVFP4_GROUP, torch.float8_e4m3fn)
        or global_scales.shape != weight.shape[:1]
        or global_scales.dtype != torch.float32
        or global_scales.device != x.device
    ):
        raise KernelInputError(
            describe("nvfp4_gemm", x=x, weight=weight, scales=scales, global_scales=global_scales, out=out, bias=bias),
            wanted="x [num_tokens, k] of fp32, bf16 or fp16 with k a multiple of 16, weight uint8 [n, k / 2] whose rows begin on "
            "4 bytes, scales float8_e4m3fn [n, k / 16], global_scales fp32 [n], out [num_tokens, n] and bias [n] or None of x's "
            "dtype, inner stride 1",
            change="pass two codes a byte, the even one in the low half, and a view of the scales' bytes as float8_e4m3fn",
        )


def check_mxfp4_gemm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if not _fits(x, weight, out, bias) or not _are_scales(scales, weight, MXFP4_GROUP, torch.uint8):
        raise KernelInputError(
            describe("mxfp4_gemm", x=x, weight=weight, scales=scales, out=out, bias=bias),
            wanted="x [num_tokens, k] of fp32, bf16 or fp16 with k a multiple of 32, weight uint8 [n, k / 2] whose rows begin on "
            "4 bytes, scales uint8 [n, k / 32], out [num_tokens, n] and bias [n] or None of x's dtype, inner stride 1",
            change="pass two codes a byte, the even one in the low half, and the exponents as bytes",
        )


def check_quantize_nvfp4(x: torch.Tensor, global_scale: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        not x.dim() == out.dim() == scales.dim() == 2
        or x.dtype not in _FLOATS
        or x.shape[1] % NVFP4_GROUP
        or out.shape != (x.shape[0], x.shape[1] // 2)
        or scales.shape != (x.shape[0], x.shape[1] // NVFP4_GROUP)
        or out.dtype != torch.uint8
        or scales.dtype != torch.float8_e4m3fn
        or global_scale.shape != (1,)
        or global_scale.dtype != torch.float32
        or not x.device == out.device == scales.device == global_scale.device
        or not _is_dense(x, out, scales)
    ):
        raise KernelInputError(
            describe("quantize_nvfp4", x=x, global_scale=global_scale, out=out, scales=scales),
            wanted="x [num_tokens, k] of fp32, bf16 or fp16 with k a multiple of 16, global_scale fp32 [1], out uint8 "
            "[num_tokens, k / 2] and scales float8_e4m3fn [num_tokens, k / 16], inner stride 1",
            change="pad k to whole groups and give outputs of these shapes",
        )


def _fits(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether activations, outputs and bias fit the weight, every inner stride is 1, and the weight can be read in words."""
    return (
        x.dim() == weight.dim() == out.dim() == 2
        and 0 < x.shape[1] == 2 * weight.shape[1]
        and out.shape == (x.shape[0], weight.shape[0])
        and x.dtype in _FLOATS
        and x.dtype == out.dtype
        and weight.dtype == torch.uint8
        and x.device == weight.device == out.device
        and _is_dense(x, weight, out)
        and not weight.stride(0) % _WORD
        and not weight.storage_offset() % _WORD
        and not weight.data_ptr() % _WORD
        and (bias is None or _is_bias(bias, out))
    )


def _is_dense(*tensors: torch.Tensor) -> bool:
    """Whether rows are dense; of one column or none, whose stride nobody takes, they always are."""
    return all(tensor.stride(1) == 1 or tensor.shape[1] <= 1 for tensor in tensors)


def _are_scales(scales: torch.Tensor, weight: torch.Tensor, group: int, dtype: torch.dtype) -> bool:
    """Whether ``scales`` has one for each whole group of the weight's k."""
    return (
        scales.dim() == 2
        and 2 * weight.shape[1] % group == 0
        and scales.shape == (weight.shape[0], 2 * weight.shape[1] // group)
        and scales.dtype == dtype
        and scales.device == weight.device
        and _is_dense(scales)
    )


def _is_bias(bias: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether ``bias`` is one dense value per output."""
    return bias.shape == out.shape[1:] and bias.dtype == out.dtype and bias.device == out.device and bias.stride(0) == 1
