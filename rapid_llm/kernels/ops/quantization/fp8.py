"""Activations in e4m3, and linear layers of e4m3 numbers, for devices that have them in hardware.

quantize_fp8 is memory-bound. A scale a token: one program covers a row, or some narrow ones, in registers where it fits, and
walks a wider one twice, once for the largest magnitude and once to round. A scale for each 128 of k, or one that is given: a
program covers some groups of 128 and shares nothing with the others.

fp8_gemm is bound by the weight's bytes for few tokens, by arithmetic for many. One program per (output tile, token tile),
numbered so that neighbours share rows in the L2 cache. Few tokens go on the side of the matrix instruction that may be narrow. A
Hopper keeps its sums of e4m3 products in fewer bits than fp32 has, so they go on to fp32 every 128 of k, with the scales there if
every 128 of k have their own.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.bytes_in_memory import NARROW_STEP, loads_in_full
from rapid_llm.kernels.ops.primitives.dependent_launch import (
    ask_ahead,
    dependent_launch,
    first_ahead,
    let_next_begin,
    pieces_ahead,
    wait_for_inputs,
)
from rapid_llm.kernels.ops.primitives.e4m3 import casts_in_two_steps, e4m3_scale, to_e4m3
from rapid_llm.kernels.ops.primitives.magnitudes import finite_magnitudes
from rapid_llm.kernels.ops.primitives.scales import GROUP, strides_of
from rapid_llm.kernels.ops.quantization.fp8_inputs import check_fp8_gemm, check_quantize_fp8
from rapid_llm.kernels.ops.quantization.split_k import merge_parts
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_GROUP_M = 8  # token tiles whose programs run one after another before the next output tile
_MOST_OWN_SCALES = 64  # outputs of a program that have scales of their own for every 128 of k
_SWAPPED_BELOW = 64  # rows of the least warpgroup product: fewer tokens than that go on its other side


def quantize_fp8(x: torch.Tensor, *, out: torch.Tensor, scales: torch.Tensor, static: bool = False) -> torch.Tensor:
    """Write x / scale, divided in fp32 and rounded to the nearest e4m3, into ``out`` and return it; the scales into ``scales``.

    A scale is the largest finite magnitude that it stands for / 448, at least the least normal fp32 number: zeros get that and
    stay zeros. Finite values past +-448 scales become +-448. NaN stays NaN, and so does an infinity, which e4m3 has not; neither
    changes a scale.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        out: [num_tokens, k], float8_e4m3fn, same device; inner stride 1, row stride free.
        scales: fp32, any strides: [num_tokens] (or [num_tokens, 1]), one a token; [num_tokens, ceil(k / 128)], one for each 128
            of k; or, with ``static``, [1].
        static: the scale is given, and positive: it is read.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/quantization/fp8.py::quantize_fp8. Origin: this repo.
    """
    group = check_quantize_fp8(x, out, scales, static)
    num_tokens, k = x.shape
    if not num_tokens:
        return out
    group = GROUP if static else group  # no scale spans a program, so it may cover any part of a row
    device = launch_device(x)
    tile = resolve_tiles("quantize_fp8", device=device, dtype=x.dtype, num_tokens=num_tokens, k=k, group=group).launch()
    two_steps, pdl = casts_in_two_steps(device), dependent_launch(device)
    if group == k and not static:
        _quantize_rows_kernel[(triton.cdiv(num_tokens, tile["BLOCK_M"]),)](
            x, out, scales, x.stride(0), out.stride(0), scales.stride(0), num_tokens, k,
            LOOPED=k > tile["BLOCK_N"], TWO_STEPS=two_steps, **tile, **pdl,
        )  # fmt: skip
        return out
    tile["BLOCK_N"] = GROUP
    groups = triton.cdiv(k, GROUP)
    across = min(triton.next_power_of_2(groups), tile["BLOCK_M"])  # groups of one token in a program
    grid = (triton.cdiv(num_tokens, tile["BLOCK_M"] // across) * triton.cdiv(groups, across),)
    _quantize_groups_kernel[grid](
        x, out, scales, x.stride(0), out.stride(0), scales.stride(0), 0 if static else scales.stride(1), num_tokens, k,
        GIVEN=static, ACROSS=across, TWO_STEPS=two_steps, **tile, **pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_rows_kernel(
    x_ptr,
    out_ptr,
    scales_ptr,
    x_stride,
    out_stride,
    scales_stride,
    num_tokens,
    k,
    LOOPED: tl.constexpr,
    TWO_STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # times a stride they can pass 2**31
    cols = tl.arange(0, BLOCK_N)[None, :]
    there = (rows < num_tokens)[:, None]
    x_rows, out_rows = x_ptr + rows[:, None] * x_stride, out_ptr + rows[:, None] * out_stride

    if LOOPED:
        largest = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, k, BLOCK_N):
            x = tl.load(x_rows + start + cols, mask=there & (start + cols < k), other=0.0).to(tl.float32)
            largest = tl.maximum(largest, finite_magnitudes(x))
        scale = e4m3_scale(tl.max(largest, 1))
        for start in range(0, k, BLOCK_N):
            inside = there & (start + cols < k)
            x = tl.load(x_rows + start + cols, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_rows + start + cols, to_e4m3(x, scale[:, None], TWO_STEPS), mask=inside)
    else:
        inside = there & (cols < k)
        x = tl.load(x_rows + cols, mask=inside, other=0.0).to(tl.float32)  # [M, N]
        scale = e4m3_scale(tl.max(finite_magnitudes(x), 1))
        tl.store(out_rows + cols, to_e4m3(x, scale[:, None], TWO_STEPS), mask=inside)
    tl.store(scales_ptr + rows * scales_stride, scale, mask=rows < num_tokens)


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_groups_kernel(
    x_ptr,
    out_ptr,
    scales_ptr,
    x_stride,
    out_stride,
    scales_stride,
    scales_stride_k,
    num_tokens,
    k,
    GIVEN: tl.constexpr,
    ACROSS: tl.constexpr,
    TWO_STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    # BLOCK_M groups of BLOCK_N elements: ACROSS of each of some tokens. All programs on axis 0: the others stop at 65,535.
    tiles = tl.cdiv(tl.cdiv(k, BLOCK_N), ACROSS)
    within = tl.arange(0, BLOCK_M)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * (BLOCK_M // ACROSS) + within // ACROSS  # times a stride past 2**31
    groups = tl.program_id(0) % tiles * ACROSS + within % ACROSS
    cols = groups[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < num_tokens)[:, None] & (cols < k)

    x = tl.load(x_ptr + rows[:, None] * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if GIVEN:
        scale = tl.full((BLOCK_M,), 1.0, tl.float32) * tl.load(scales_ptr)
    else:
        scale = e4m3_scale(tl.max(finite_magnitudes(x), 1))
        scales_ptrs = scales_ptr + rows * scales_stride + groups.to(tl.int64) * scales_stride_k
        tl.store(scales_ptrs, scale, mask=(rows < num_tokens) & (groups * BLOCK_N < k))
    tl.store(out_ptr + rows[:, None] * out_stride + cols, to_e4m3(x, scale[:, None], TWO_STEPS), mask=inside)


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

    Args:
        x: [num_tokens, k], float8_e4m3fn; inner stride 1, row stride free.
        weight: [n, k], float8_e4m3fn; inner stride 1, row stride free. From sm90 on it may be read before the kernel launched
            last has ended, so it is not what that one writes.
        x_scales: fp32, any strides: [1]; [num_tokens] (or [num_tokens, 1]); or [num_tokens, ceil(k / 128)].
        weight_scales: fp32, any strides: [1] or [n] (or [n, 1]); beside an x scale for each 128 of k, [ceil(n / 128),
            ceil(k / 128)] or [n, ceil(k / 128)].
        out: [num_tokens, n], fp32 | bf16 | fp16, same device, apart from x; inner stride 1, row stride free.
        bias: [n], dtype of out, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/quantization/fp8.py::fp8_gemm. Origin: this repo; e4m3 as in Micikevicius et al. 2022,
    https://arxiv.org/abs/2209.05433, scales of 128 x 128 and sums that go on to fp32 as in DeepSeek-AI 2024,
    https://arxiv.org/abs/2412.19437.
    """
    group, outputs = check_fp8_gemm(x, weight, x_scales, weight_scales, out, bias)
    (num_tokens, k), n = x.shape, weight.shape[0]
    if not num_tokens or not n:
        return out
    device = launch_device(x)
    tile = resolve_tiles("fp8_gemm", device=device, dtype=out.dtype, num_tokens=num_tokens, n=n, k=k, group=group).launch()
    grouped = (group, outputs) != (k, 1)
    if grouped:
        tile["BLOCK_K"] = GROUP
        if outputs == 1:  # beside a program's sums, its scales take a register each
            tile["BLOCK_N"] = min(tile["BLOCK_N"], _MOST_OWN_SCALES)
    elif not loads_in_full(x, weight):
        tile["BLOCK_K"] = min(tile["BLOCK_K"], NARROW_STEP)
    splits = tile.setdefault("SPLIT_K", 1)
    piece, pieces = pieces_ahead(weight, num_tokens, tile["BLOCK_N"], splits)
    target = out if splits == 1 else out.new_empty(splits * num_tokens, n, dtype=torch.float32)
    grid = (splits * triton.cdiv(num_tokens, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),)
    _fp8_gemm_kernel[grid](
        x, weight, x_scales, weight_scales, bias if splits == 1 else None, target,
        x.stride(0), weight.stride(0), *strides_of(x_scales), *strides_of(weight_scales), target.stride(0), num_tokens, n, k,
        piece, PIECES=pieces, OUTPUTS=outputs if grouped else 0, EVEN_K=k % tile["BLOCK_K"] == 0,
        SWAPPED=tile["BLOCK_M"] < _SWAPPED_BELOW, GROUP_M=_GROUP_M, **tile, **dependent_launch(device),
    )  # fmt: skip
    if splits > 1:
        merge_parts(target.view(splits, num_tokens, n), bias, out)
    return out


# Strides of x's scales are 0 where there is one for all: as plain numbers one and many tokens share a binary.
@triton.jit(do_not_specialize=["num_tokens", "piece", "x_scales_stride", "x_scales_stride_k"])
def _fp8_gemm_kernel(
    x_ptr,
    weight_ptr,
    x_scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    weight_stride,
    x_scales_stride,
    x_scales_stride_k,
    weight_scales_stride,
    weight_scales_stride_k,
    out_stride,
    num_tokens,
    n,
    k,
    piece,
    PIECES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    # GROUP_M token tiles, then the next output tile, so that both operands are read from L2.
    tiles_m, tiles_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(n, BLOCK_N)
    split, tile = tl.program_id(0) // (tiles_m * tiles_n), tl.program_id(0) % (tiles_m * tiles_n)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    rows = (first_m + within % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (within // group_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    rows64, cols64 = rows.to(tl.int64), cols.to(tl.int64)  # times a stride they can pass 2**31
    row_mask, col_mask = rows < num_tokens, cols < n
    share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLIT_K) * BLOCK_K

    if PDL and piece > 0:
        first = first_ahead(split * share, k, piece, PIECES)
        ask_ahead(weight_ptr + tl.minimum(cols64, n - 1) * weight_stride, piece, PIECES, first)
    wait_for_inputs(PDL)
    # Kept apart from the pointers: where strides are odd, a pointer of each element would live across the loop.
    x_offsets = rows64[:, None] * x_stride + inner[None, :]  # [M, K]
    weight_offsets = cols64[:, None] * weight_stride + inner[None, :]  # [N, K]
    x_scales_ptrs = x_scales_ptr + rows64 * x_scales_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.float32)
    weight_scales_ptrs = weight_scales_ptr + (cols64 if OUTPUTS <= 1 else cols64 // OUTPUTS) * weight_scales_stride
    if OUTPUTS >= BLOCK_N:  # one scale for all outputs of the program, which is a number then
        weight_scales_ptrs = weight_scales_ptr + ((within // group_m) * BLOCK_N // OUTPUTS).to(tl.int64) * weight_scales_stride
    for start in range(split * share, tl.minimum(split * share + share, k), BLOCK_K):
        x = _load_step(x_ptr + start + x_offsets, row_mask, start + inner, k, EVEN_K)
        weight = _load_step(weight_ptr + start + weight_offsets, col_mask, start + inner, k, EVEN_K)
        if OUTPUTS == 0:
            IMPRECISE: tl.constexpr = BLOCK_K if BLOCK_K < 128 else 128  # of k, summed as the matrix instruction does it
            if SWAPPED:
                acc = tl.dot(weight, tl.trans(x), acc, max_num_imprecise_acc=IMPRECISE)
            else:
                acc = tl.dot(x, tl.trans(weight), acc, max_num_imprecise_acc=IMPRECISE)
        else:
            of_x = tl.load(x_scales_ptrs + start // BLOCK_K * x_scales_stride_k, mask=row_mask, other=0.0)
            if OUTPUTS >= BLOCK_N:
                of_x *= tl.load(weight_scales_ptrs + start // BLOCK_K * weight_scales_stride_k)
            product = tl.dot(weight, tl.trans(x)) * of_x[None, :] if SWAPPED else tl.dot(x, tl.trans(weight)) * of_x[:, None]
            if OUTPUTS < BLOCK_N:
                of_weight = tl.load(weight_scales_ptrs + start // BLOCK_K * weight_scales_stride_k, mask=col_mask, other=0.0)
                product *= of_weight[:, None] if SWAPPED else of_weight[None, :]
            acc += product
    if SWAPPED:
        acc = tl.trans(acc)
    if OUTPUTS == 0:
        acc *= tl.load(x_scales_ptrs, mask=row_mask, other=0.0)[:, None]
        acc *= tl.load(weight_scales_ptrs, mask=col_mask, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (split * num_tokens + rows64)[:, None] * out_stride + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def _load_step(pointers, mask, inner, k, EVEN_K: tl.constexpr):
    """Rows of one step of k; 0 past k and past the last row."""
    inside = mask[:, None] if EVEN_K else mask[:, None] & (inner < k)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)
