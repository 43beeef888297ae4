"""Norms and activations that end in e4m3, in plain torch."""

import torch
from torch.nn.functional import silu

from rapid_llm.kernels.ops.fallback.quantization.fp8 import encode
from rapid_llm.kernels.ops.fused.inputs import check_add_rms_norm_fp8, check_swiglu_fp8


def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, scales: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to ``residual`` in place, rounded to its dtype, and write rms_norm(residual) as e4m3 numbers into ``out``, returned.

    The norm is fp32 until it is rounded to e4m3, as quantize_fp8 does it.

    Args:
        x: [num_tokens, d], fp32 | bf16 | fp16; inner stride 1, row stride free.
        residual: like x; read and written; apart from x.
        weight: [d], same dtype; stride 1.
        out: [num_tokens, d], float8_e4m3fn; inner stride 1, row stride free.
        scales: fp32, any strides: [num_tokens] (or [num_tokens, 1]), one a token; or [num_tokens, ceil(d / 128)].
        eps: added to the mean square.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/fused.py::add_rms_norm_fp8. Origin: this repo.
    """
    group = check_add_rms_norm_fp8(x, residual, weight, out, scales)
    if x.shape[0]:
        wide = residual.add_(x).to(torch.float32)
        scale = wide.square().mean(dim=1, keepdim=True).add_(eps).rsqrt_()
        encode(wide * scale * weight, out, scales, group)
    return out


def swiglu_fp8(gate_up: torch.Tensor, *, out: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Write silu(gate) * up, computed in fp32, as quantize_fp8 does into ``out`` and return it; the scales into ``scales``.

    Args:
        gate_up: [num_tokens, 2 * d], fp32 | bf16 | fp16; gate first; inner stride 1, row stride free.
        out: [num_tokens, d], float8_e4m3fn, same device; inner stride 1, row stride free.
        scales: fp32, any strides: [num_tokens] (or [num_tokens, 1]), one a token; or [num_tokens, ceil(d / 128)].
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/fused.py::swiglu_fp8. Origin: this repo.
    """
    group = check_swiglu_fp8(gate_up, out, scales)
    if out.shape[0]:
        gate, up = gate_up.chunk(2, dim=1)
        encode(silu(gate.to(torch.float32)) * up, out, scales, group)
    return out
