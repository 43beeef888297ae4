"""RMS norm over the last dimension, alone (also of the heads of q or k) and behind the residual sum.

Memory-bound. A program covers one row, or some heads of one token where heads are narrow; the row stays in registers where it
fits into one tile, a wider one is walked twice. Zhang and Sennrich 2019, arXiv:1910.07467.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.norm.inputs import check_add_rms_norm, check_rms_norm
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, let_next_begin, wait_for_inputs
from rapid_llm.kernels.ops.tile_policy import resolve_tiles


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, eps: float) -> torch.Tensor:
    """Write x / sqrt(mean(x ** 2) + eps) * weight over the last dimension into ``out`` and return it; fp32 maths.

    Args:
        x: [num_tokens, d] or [num_tokens, num_heads, d], fp32 | bf16 | fp16; inner stride 1, the others free.
        weight: [d], same dtype; stride 1.
        out: like x in shape, dtype and device; inner stride 1, the others free; may be x itself.
        eps: added to the mean square.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/norm.py::rms_norm. Origin: this repo.
    """
    check_rms_norm(x, weight, out)
    if x.numel():
        num_tokens, d = x.shape[0], x.shape[-1]
        num_heads, x_head_stride, out_head_stride = (x.shape[1], x.stride(1), out.stride(1)) if x.dim() == 3 else (1, 0, 0)
        sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "d": d}
        device = launch_device(x)
        tile = resolve_tiles("rms_norm", device=device, dtype=x.dtype, **sizes).launch()
        grid = (num_tokens * triton.cdiv(num_heads, tile["BLOCK_M"]),)
        _rms_norm_kernel[grid](
            x,
            weight,
            out,
            x.stride(0),
            x_head_stride,
            out.stride(0),
            out_head_stride,
            num_heads,
            d,
            eps,
            LOOPED=d > tile["BLOCK_N"],
            **tile,
            **dependent_launch(device),
        )
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to ``residual`` in place, rounded to its dtype, write rms_norm(residual) into ``out`` and return that.

    Args:
        x: [num_tokens, d], fp32 | bf16 | fp16; inner stride 1, row stride free.
        residual: like x; read and written; apart from x and out.
        weight: [d], same dtype; stride 1. From sm90 on it may be read before the kernel launched last has ended, so it is not
            what that one writes.
        out: like x; inner stride 1, row stride free; may be x itself.
        eps: added to the mean square.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/norm.py::add_rms_norm. Origin: this repo.
    """
    check_add_rms_norm(x, residual, weight, out)
    num_tokens, d = x.shape
    if x.numel():
        device = launch_device(x)
        tile = resolve_tiles("add_rms_norm", device=device, dtype=x.dtype, num_tokens=num_tokens, d=d).launch()
        _add_rms_norm_kernel[(num_tokens,)](
            x,
            residual,
            weight,
            out,
            x.stride(0),
            residual.stride(0),
            out.stride(0),
            d,
            eps,
            LOOPED=d > tile["BLOCK_N"],
            **tile,
            **dependent_launch(device),
        )
    return out


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    x_head_stride,
    out_stride,
    out_head_stride,
    num_heads,
    d,
    eps,
    LOOPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    groups = tl.cdiv(num_heads, BLOCK_M)  # of heads a token; all on axis 0, since the others stop at 65,535
    token = (tl.program_id(0) // groups).to(tl.int64)
    heads = (tl.program_id(0) % groups * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]  # [M, 1]
    cols = tl.arange(0, BLOCK_N)[None, :]
    x_rows = x_ptr + token * x_stride + heads * x_head_stride
    out_rows = out_ptr + token * out_stride + heads * out_head_stride

    if LOOPED:
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, d, BLOCK_N):
            inside = (heads < num_heads) & (start + cols < d)
            x = tl.load(x_rows + start + cols, mask=inside, other=0.0).to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 1) / d + eps)[:, None]
        for start in range(0, d, BLOCK_N):
            inside = (heads < num_heads) & (start + cols < d)
            x = tl.load(x_rows + start + cols, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + start + cols, mask=start + cols < d, other=0.0).to(tl.float32)
            tl.store(out_rows + start + cols, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        inside = (heads < num_heads) & (cols < d)
        x = tl.load(x_rows + cols, mask=inside, other=0.0).to(tl.float32)  # [M, N]
        weight = tl.load(weight_ptr + cols, mask=cols < d, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / d + eps)[:, None]
        tl.store(out_rows + cols, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    d,
    eps,
    LOOPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    if not LOOPED:  # the weight is not in the cache, as x is: it would be waited for
        weight = tl.load(weight_ptr + cols, mask=cols < d, other=0.0).to(tl.float32)
    wait_for_inputs(PDL, False)
    x_row = x_ptr + token * x_stride
    residual_row = residual_ptr + token * residual_stride
    out_row = out_ptr + token * out_stride

    if LOOPED:
        squares = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, d, BLOCK_N):
            rounded, total = _add(x_row + start + cols, residual_row + start + cols, start + cols < d)
            tl.store(residual_row + start + cols, rounded, mask=start + cols < d)
            squares += total * total
            tl.debug_barrier()  # the second walk reads the residual that this one writes
        scale = tl.rsqrt(tl.sum(squares, 0) / d + eps)
        for start in range(0, d, BLOCK_N):
            inside = start + cols < d
            total = tl.load(residual_row + start + cols, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_row + start + cols, (total * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        inside = cols < d
        rounded, total = _add(x_row + cols, residual_row + cols, inside)
        scale = tl.rsqrt(tl.sum(total * total, 0) / d + eps)
        tl.store(residual_row + cols, rounded, mask=inside)
        tl.store(out_row + cols, (total * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add(x_ptrs, residual_ptrs, inside):
    """The new residual, rounded once to its dtype, and the same in fp32: the norm is that of what is stored."""
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    rounded = (x + residual).to(residual_ptrs.dtype.element_ty)
    return rounded, rounded.to(tl.float32)
