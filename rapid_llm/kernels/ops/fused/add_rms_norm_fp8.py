"""RMS norm behind the residual sum, as e4m3 numbers and their scales, for devices that have e4m3 in hardware.

Memory-bound; one program a row, as [groups, elements of a group]. The row stays in registers where it fits into one tile; a wider
one is walked twice. Zhang and Sennrich 2019, arXiv:1910.07467.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.fused.inputs import check_add_rms_norm_fp8
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.primitives.e4m3 import casts_in_two_steps, e4m3_scale, to_e4m3
from rapid_llm.kernels.ops.primitives.magnitudes import finite_magnitudes
from rapid_llm.kernels.ops.primitives.scales import GROUP
from rapid_llm.kernels.ops.tile_policy import resolve_tiles


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
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/fused.py::add_rms_norm_fp8. Origin: this repo.
    """
    group = check_add_rms_norm_fp8(x, residual, weight, out, scales)
    num_tokens, d = x.shape
    if num_tokens:
        device = launch_device(x)
        sizes = {"num_tokens": num_tokens, "d": d, "group": group}
        tile = resolve_tiles("add_rms_norm_fp8", device=device, dtype=x.dtype, **sizes).launch()
        grouped = group != d
        if grouped:
            tile["BLOCK_N"] = max(tile["BLOCK_N"], GROUP)
        _add_rms_norm_fp8_kernel[(num_tokens,)](
            x, residual, weight, out, scales, x.stride(0), residual.stride(0), out.stride(0),
            scales.stride(0), scales.stride(1) if grouped else 0, d, eps,
            GROUPED=grouped, WIDTH=GROUP if grouped else tile["BLOCK_N"], LOOPED=d > tile["BLOCK_N"],
            TWO_STEPS=casts_in_two_steps(device), **tile, **dependent_launch(device),
        )  # fmt: skip
    return out


@triton.jit
def _add_rms_norm_fp8_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
    x_stride,
    residual_stride,
    out_stride,
    scales_stride,
    scales_stride_d,
    d,
    eps,
    GROUPED: tl.constexpr,
    WIDTH: tl.constexpr,
    LOOPED: tl.constexpr,
    TWO_STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)  # token * stride can pass 2**31
    groups = tl.arange(0, BLOCK_N // WIDTH)
    cols = groups[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [G, W]
    x_row, residual_row = x_ptr + token * x_stride, residual_ptr + token * residual_stride
    out_row, scales_row = out_ptr + token * out_stride, scales_ptr + token * scales_stride

    if LOOPED:
        squares = tl.zeros((BLOCK_N // WIDTH, WIDTH), tl.float32)
        largest = tl.zeros((BLOCK_N // WIDTH, WIDTH), tl.float32)  # of the whole row, before it is divided by its size
        for start in range(0, d, BLOCK_N):
            inside = start + cols < d
            rounded, total = _add(x_row + start + cols, residual_row + start + cols, inside)
            tl.store(residual_row + start + cols, rounded, mask=inside)
            squares += total * total
            if not GROUPED:
                weight = tl.load(weight_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
                largest = tl.maximum(largest, finite_magnitudes(total * weight))
            tl.debug_barrier()  # the second walk reads the residual that this one writes
        size = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / d + eps)
        if not GROUPED:
            scale = e4m3_scale(tl.max(largest, 1) * size)
            tl.store(scales_row + groups, scale)
        for start in range(0, d, BLOCK_N):
            inside = start + cols < d
            total = tl.load(residual_row + start + cols, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
            norm = total * size * weight
            if GROUPED:
                scale = e4m3_scale(tl.max(finite_magnitudes(norm), 1))
                first = start // WIDTH + groups
                tl.store(scales_row + first.to(tl.int64) * scales_stride_d, scale, mask=first * WIDTH < d)
            tl.store(out_row + start + cols, to_e4m3(norm, scale[:, None], TWO_STEPS), mask=inside)
    else:
        inside = cols < d
        rounded, total = _add(x_row + cols, residual_row + cols, inside)
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        size = tl.rsqrt(tl.sum(tl.sum(total * total, 1), 0) / d + eps)
        norm = total * size * weight
        scale = e4m3_scale(tl.max(finite_magnitudes(norm), 1))
        tl.store(residual_row + cols, rounded, mask=inside)
        tl.store(scales_row + groups.to(tl.int64) * scales_stride_d, scale, mask=groups * WIDTH < d)
        tl.store(out_row + cols, to_e4m3(norm, scale[:, None], TWO_STEPS), mask=inside)


@triton.jit
def _add(x_ptrs, residual_ptrs, inside):
    """The new residual, rounded once to its dtype, and the same in fp32: the norm is that of what is stored."""
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    rounded = (x + residual).to(residual_ptrs.dtype.element_ty)
    return rounded, rounded.to(tl.float32)
