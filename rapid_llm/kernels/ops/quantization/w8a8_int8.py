"""Activations in int8, and linear layers of int8 numbers.

quantize_int8 is memory-bound: one program covers a row, or some narrow ones, in registers where it fits, and walks a wider one
twice, once for the largest magnitude and once to round; where the scale is given, a program covers a tile of any row.

int8_gemm is bound by the weight's bytes for few tokens, by arithmetic for many. One program per (output tile, token tile),
numbered so that neighbours share rows in the L2 cache; few tokens go on the side of the matrix instruction that may be narrow.
Sums are exact, so the order of k is free and scales meet them once, at the end.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.bytes_in_memory import NARROW_STEP, loads_in_full
from rapid_llm.kernels.ops.primitives.dependent_launch import (
    ask_ahead,
    dependent_launch,
    let_next_begin,
    pieces_ahead,
    wait_for_inputs,
)
from rapid_llm.kernels.ops.primitives.magnitudes import finite_magnitudes
from rapid_llm.kernels.ops.primitives.scales import strides_of
from rapid_llm.kernels.ops.quantization.w8a8_int8_inputs import check_int8_gemm, check_quantize_int8
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_GROUP_M = 8  # token tiles whose programs run one after another before the next output tile
_SWAPPED_BELOW = 64  # rows of the least warpgroup product: fewer tokens than that go on its other side


def quantize_int8(x: torch.Tensor, *, out: torch.Tensor, scales: torch.Tensor, static: bool = False) -> torch.Tensor:
    """Write x / scale, divided in fp32, rounded to the nearest of -127..127, into ``out`` and return it; scales into ``scales``.

    A scale is the token's largest finite magnitude / 127, at least the least normal fp32 number: zeros get that and stay zeros.
    Values past +-127 scales become +-127, infinities too, and NaN becomes 0. int8 has no code for either, so the scale of a
    token that has one is NaN, and so is all that the token is multiplied with; a given scale cannot tell of them.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        out: [num_tokens, k], int8, same device; inner stride 1, row stride free.
        scales: fp32, any stride: [num_tokens] (or [num_tokens, 1]); or, with ``static``, [1].
        static: the scale is given, and positive: it is read.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/quantization/w8a8_int8.py::quantize_int8. Origin: Xiao et al. 2022, https://arxiv.org/abs/2211.10438.
    """
    check_quantize_int8(x, out, scales, static)
    num_tokens, k = x.shape
    if num_tokens:
        device = launch_device(x)
        tile = resolve_tiles("quantize_int8", device=device, dtype=x.dtype, num_tokens=num_tokens, k=k).launch()
        tiles = triton.cdiv(k, tile["BLOCK_N"])
        grid = (triton.cdiv(num_tokens, tile["BLOCK_M"]), tiles if static else 1)
        _quantize_int8_kernel[grid](
            x, out, scales, x.stride(0), out.stride(0), scales.stride(0), num_tokens, k,
            GIVEN=static, LOOPED=tiles > 1, **tile, **dependent_launch(device),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_int8_kernel(
    x_ptr,
    out_ptr,
    scales_ptr,
    x_stride,
    out_stride,
    scales_stride,
    num_tokens,
    k,
    GIVEN: tl.constexpr,
    LOOPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # times a stride they can pass 2**31
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    there = (rows < num_tokens)[:, None]
    x_rows, out_rows = x_ptr + rows[:, None] * x_stride, out_ptr + rows[:, None] * out_stride

    if GIVEN:
        inside = there & (cols < k)
        x = tl.load(x_rows + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_rows + cols, _to_int8(x, tl.load(scales_ptr)), mask=inside)
    elif LOOPED:
        largest = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        spoilt = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for start in range(0, k, BLOCK_N):
            x = tl.load(x_rows + start + cols, mask=there & (start + cols < k), other=0.0).to(tl.float32)
            largest = tl.maximum(largest, finite_magnitudes(x))
            spoilt |= _not_finite(x)
        scale = _scale(tl.max(largest, 1))
        for start in range(0, k, BLOCK_N):
            inside = there & (start + cols < k)
            x = tl.load(x_rows + start + cols, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_rows + start + cols, _to_int8(x, scale[:, None]), mask=inside)
        told = tl.where(tl.max(spoilt, 1) > 0, float("nan"), scale)
        tl.store(scales_ptr + rows * scales_stride, told, mask=rows < num_tokens)
    else:
        inside = there & (cols < k)
        x = tl.load(x_rows + cols, mask=inside, other=0.0).to(tl.float32)  # [M, N]
        scale = _scale(tl.max(finite_magnitudes(x), 1))
        tl.store(out_rows + cols, _to_int8(x, scale[:, None]), mask=inside)
        told = tl.where(tl.max(_not_finite(x), 1) > 0, float("nan"), scale)
        tl.store(scales_ptr + rows * scales_stride, told, mask=rows < num_tokens)


@triton.jit
def _not_finite(values):
    """1 for NaN and infinities, 0 else."""
    return tl.where(tl.abs(values) < float("inf"), 0, 1)


@triton.jit
def _scale(largest):
    """The scale that takes ``largest`` to 127; at least the least normal fp32 number, so that zeros have one."""
    return tl.maximum(tl.math.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)), 1.1754943508222875e-38)


@triton.jit
def _to_int8(values, scale):
    """values / scale, an IEEE division, rounded to the nearest integer of -127..127, ties to the even one; 0 for NaN."""
    quotients = tl.math.div_rn(values, tl.broadcast_to(scale, values.shape))
    quotients = tl.minimum(tl.maximum(quotients, -127.0), 127.0)
    nearest = (quotients + 12582912.0) - 12582912.0  # 1.5 * 2**23, whose neighbours are 1 apart
    return tl.where(values == values, nearest, 0.0).to(tl.int8)


def int8_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write (x @ weight.T) * x_scales * weight_scales (+ bias) into ``out`` and return it; the sum over k is exact.

    Args:
        x: [num_tokens, k], int8; inner stride 1, row stride free. k is at most 131,071, so that sums stay within int32.
        weight: [n, k], int8; inner stride 1, row stride free. From sm90 on it may be read before the kernel launched last has
            ended, so it is not what that one writes.
        x_scales: fp32, any stride: [1] or [num_tokens] (or [num_tokens, 1]).
        weight_scales: fp32, any stride: [n] (or [n, 1]).
        out: [num_tokens, n], fp32 | bf16 | fp16, same device; inner stride 1, row stride free.
        bias: [n], dtype of out, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/quantization/w8a8_int8.py::int8_gemm. Origin: Xiao et al. 2022, https://arxiv.org/abs/2211.10438.
    """
    check_int8_gemm(x, weight, x_scales, weight_scales, out, bias)
    (num_tokens, k), n = x.shape, weight.shape[0]
    if not num_tokens or not n:
        return out
    device = launch_device(x)
    tile = resolve_tiles("int8_gemm", device=device, dtype=out.dtype, num_tokens=num_tokens, n=n, k=k).launch()
    if not loads_in_full(x, weight):
        tile["BLOCK_K"] = min(tile["BLOCK_K"], NARROW_STEP)
    piece, pieces = pieces_ahead(weight, num_tokens, tile["BLOCK_N"])
    grid = (triton.cdiv(num_tokens, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),)
    _int8_gemm_kernel[grid](
        x, weight, x_scales, weight_scales, bias, out,
        x.stride(0), weight.stride(0), strides_of(x_scales)[0], strides_of(weight_scales)[0], out.stride(0), num_tokens, n, k,
        piece, PIECES=pieces, EVEN_K=k % tile["BLOCK_K"] == 0, SWAPPED=tile["BLOCK_M"] < _SWAPPED_BELOW, GROUP_M=_GROUP_M,
        **tile, **dependent_launch(device),
    )  # fmt: skip
    return out


# The stride of x's scales is 0 where there is one for all: as a plain number one and many tokens share a binary.
@triton.jit(do_not_specialize=["num_tokens", "piece", "x_scales_stride"])
def _int8_gemm_kernel(
    x_ptr,
    weight_ptr,
    x_scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    weight_stride,
    x_scales_stride,
    weight_scales_stride,
    out_stride,
    num_tokens,
    n,
    k,
    piece,
    PIECES: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    # GROUP_M token tiles, then the next output tile, so that both operands are read from L2.
    tiles_m, tiles_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first_m = tl.program_id(0) // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    rows = (first_m + within % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (within // group_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    rows64, cols64 = rows.to(tl.int64), cols.to(tl.int64)  # times a stride they can pass 2**31
    row_mask, col_mask = rows < num_tokens, cols < n

    if PDL and piece > 0:
        ask_ahead(weight_ptr + tl.minimum(cols64, n - 1) * weight_stride, piece, PIECES)
    wait_for_inputs(PDL)
    # Kept apart from the pointers: where strides are odd, a pointer of each element would live across the loop.
    x_offsets = rows64[:, None] * x_stride + inner[None, :]  # [M, K]
    weight_offsets = cols64[:, None] * weight_stride + inner[None, :]  # [N, K]
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, k, BLOCK_K):
        x_mask, weight_mask = row_mask[:, None], col_mask[:, None]
        if not EVEN_K:
            left = (start + inner < k)[None, :]
            x_mask, weight_mask = x_mask & left, weight_mask & left
        x = tl.load(x_ptr + start + x_offsets, mask=x_mask, other=0)
        weight = tl.load(weight_ptr + start + weight_offsets, mask=weight_mask, other=0)
        if SWAPPED:
            total = tl.dot(weight, tl.trans(x), total, out_dtype=tl.int32)
        else:
            total = tl.dot(x, tl.trans(weight), total, out_dtype=tl.int32)
    acc = total.to(tl.float32)
    if SWAPPED:
        acc = tl.trans(acc)
    acc *= tl.load(x_scales_ptr + rows64 * x_scales_stride, mask=row_mask, other=0.0)[:, None]
    acc *= tl.load(weight_scales_ptr + cols64 * weight_scales_stride, mask=col_mask, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows64[:, None] * out_stride + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])
