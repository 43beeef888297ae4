"""Linear layer with a weight of 4-bit codes. Bound by the weight's bytes for few tokens, by arithmetic for many.

One program per (output tile, token tile), numbered so that neighbours share rows in the L2 cache, and several where these alone
would leave a card idle, each with a share of k. Two codes of a byte become two neighbours of x's dtype in registers, zero point
taken off: whole numbers of at most 15 in size, which are exact. A scale therefore meets sums in fp32 and never a weight: after
the last of k where an output has one scale, after every group of k else. One token: one program per few outputs, products
without a matrix instruction, for those would compute sixteen rows of which one is wanted.
The weight is the left operand, which a matrix instruction takes from registers.

A zero point that is no whole number cannot be taken off a code exactly in 16 bits. There 8 is taken off, and what a zero point
differs from 8 meets the group's sum of x, both in fp32.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.codes import code_offset, halves, has_inline_ptx
from rapid_llm.kernels.ops.primitives.dependent_launch import (
    ask_ahead,
    dependent_launch,
    first_ahead,
    let_next_begin,
    pieces_ahead,
    wait_for_inputs,
)
from rapid_llm.kernels.ops.quantization.split_k import merge_parts
from rapid_llm.kernels.ops.quantization.weight_only_inputs import check_w4a16_gemm
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_GROUP_M = 8  # token tiles whose programs run one after another before the next output tile
_MOST_STEP = 128  # elements of k that a step of the loop loads; a longer BLOCK_K holds a longer group
_MOST_GEMV_STEP = 2048  # the same for one token


def w4a16_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    out: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write x @ ((codes - zeros) * scales).T (+ bias), accumulated in fp32 and rounded once, into ``out`` and return it.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        weight: [n, k / 2], uint8, two codes a byte: element 2i in the low half, 2i + 1 in the high one; inner stride 1, row
            stride free. From sm90 on it may be read before the kernel launched last has ended, so it is not what that one writes.
        scales: [n, k / group], dtype of x or fp32; inner stride 1, row stride free. A group is a power of two from 16 to 1024,
            or all of k.
        out: [num_tokens, n], dtype and device of x, apart from it; inner stride 1, row stride free.
        zeros: [n, k / group], uint8, the code 0..15 that stands for 0, a byte each; or fp32, any number in its place; inner
            stride 1, row stride free. None is 8.
        bias: [n], dtype of x, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/quantization/weight_only.py::w4a16_gemm. Origin: this repo; groups with zero points as in
    Frantar et al. 2022, https://arxiv.org/abs/2210.17323.
    """
    group = check_w4a16_gemm(x, weight, scales, out, zeros, bias)
    (num_tokens, k), n = x.shape, weight.shape[0]
    if not num_tokens or not n:
        return out
    device = launch_device(x)
    tile = resolve_tiles(
        "w4a16_gemm", device=device, dtype=x.dtype, block_k_multiple=1 if group == k else group,
        num_tokens=num_tokens, n=n, k=k, group=group,
    ).launch()  # fmt: skip
    block_m, block_n, block_k = (tile.pop(name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    grouped, zeros_stride, ptx = 0 if group == k else group, 0 if zeros is None else zeros.stride(0), has_inline_ptx()
    if block_m == 1:
        step = min(block_k, _MOST_GEMV_STEP)
        piece, asked = pieces_ahead(weight, num_tokens, block_n)
        _w4a16_gemv_kernel[(triton.cdiv(n, block_n),)](
            x, weight, scales, zeros, bias, out, weight.stride(0), scales.stride(0), zeros_stride, n, k, piece,
            ASKED=asked, GROUP=grouped, PTX=ptx, EVEN=n % block_n == 0 and k % step == 0, BLOCK_N=block_n, STEP=step,
            **tile, **dependent_launch(device),
        )  # fmt: skip
        return out
    splits, step = tile.setdefault("SPLIT_K", 1), min(block_k, _MOST_STEP)
    piece, asked = pieces_ahead(weight, num_tokens, block_n, splits)
    target = out if splits == 1 else out.new_empty(splits * num_tokens, n, dtype=torch.float32)
    grid = (splits * triton.cdiv(num_tokens, block_m) * triton.cdiv(n, block_n),)
    _w4a16_gemm_kernel[grid](
        x, weight, scales, zeros, bias if splits == 1 else None, target,
        x.stride(0), weight.stride(0), scales.stride(0), zeros_stride, target.stride(0), num_tokens, n, k, piece,
        ASKED=asked, FLOAT_ZEROS=zeros is not None and zeros.dtype == torch.float32,
        GROUP=grouped, PTX=ptx, EVEN_K=k % step == 0, GROUP_M=_GROUP_M, STEP=step, BLOCK_M=block_m, BLOCK_N=block_n,
        **tile, **dependent_launch(device),
    )  # fmt: skip
    if splits > 1:
        merge_parts(target.view(splits, num_tokens, n), bias, out)
    return out


@triton.jit(do_not_specialize=["piece"])
def _w4a16_gemv_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    weight_stride,
    scales_stride,
    zeros_stride,
    n,
    k,
    piece,
    ASKED: tl.constexpr,
    GROUP: tl.constexpr,
    PTX: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL and piece > 0:  # asked for, not loaded: codes that are held while the program waits take half as many registers again
        rows = cols if EVEN else tl.minimum(cols, n - 1)
        ask_ahead(weight_ptr + rows.to(tl.int64) * weight_stride, piece, ASKED)
    wait_for_inputs(PDL)
    cols64, inner = cols.to(tl.int64), tl.arange(0, STEP // 2)
    weight_ptrs = weight_ptr + cols64[:, None] * weight_stride + inner[None, :]  # [N, STEP / 2]
    # The bytes that a thread loads at once are added up there; then they meet the scale and the zero point that they share.
    GROUPS: tl.constexpr = 1 if GROUP == 0 or GROUP > STEP else STEP // GROUP
    BYTES: tl.constexpr = 8 if STEP // GROUPS == 16 else 16
    PIECES: tl.constexpr = STEP // 2 // GROUPS // BYTES
    groups = tl.arange(0, GROUPS)
    scales_ptrs = scales_ptr + cols64[:, None] * scales_stride + groups[None, :]  # [N, GROUPS]
    offset = code_offset(tl.float32)
    acc = tl.zeros((BLOCK_N, GROUPS, PIECES), tl.float32)
    for start in range(0, k, STEP):
        if EVEN:
            x = tl.load(x_ptr + start + tl.arange(0, STEP))
            packed = tl.load(weight_ptrs + start // 2)
        else:
            x = tl.load(x_ptr + start + tl.arange(0, STEP), mask=start + tl.arange(0, STEP) < k, other=0.0)
            left = (start + 2 * inner < k)[None, :]
            packed = tl.load(weight_ptrs + start // 2, mask=(cols < n)[:, None] & left, other=0)
        even, odd = tl.split(x.to(tl.float32).reshape(STEP // 2, 2))
        low, high = halves(packed, tl.float32, PTX)
        products = (low - offset) * even[None, :] + (high - offset) * odd[None, :]
        sums = tl.sum(products.reshape(BLOCK_N, GROUPS, PIECES, BYTES), 3)
        rests = tl.sum((even + odd).reshape(GROUPS, PIECES, BYTES), 2)  # what a zero point of 1 takes off
        first = 0 if GROUP == 0 else start // GROUP
        there = (cols < n)[:, None] & (start + groups * GROUP < k)[None, :]  # where GROUP is 0, the one scale is
        if zeros_ptr is None:
            sums -= 8.0 * rests[None, :, :]
        else:
            zeros = tl.load(zeros_ptr + cols64[:, None] * zeros_stride + groups[None, :] + first, mask=there, other=0)
            sums -= zeros.to(tl.float32)[:, :, None] * rests[None, :, :]
        scales = tl.load(scales_ptrs + first, mask=there, other=0.0)
        acc += sums * scales.to(tl.float32)[:, :, None]
    result = tl.sum(tl.sum(acc, 2), 1)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + cols, result.to(out_ptr.dtype.element_ty), mask=cols < n)


@triton.jit(do_not_specialize=["num_tokens", "piece"])
def _w4a16_gemm_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    weight_stride,
    scales_stride,
    zeros_stride,
    out_stride,
    num_tokens,
    n,
    k,
    piece,
    ASKED: tl.constexpr,
    FLOAT_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    PTX: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
    rows64, cols64 = rows.to(tl.int64), cols.to(tl.int64)  # times a stride they can pass 2**31
    row_mask, col_mask = rows < num_tokens, cols < n

    # A product never reaches past its group, nor a split into one.
    WIDTH: tl.constexpr = GROUP if GROUP != 0 and GROUP < STEP else STEP
    UNIT: tl.constexpr = GROUP if GROUP > STEP else STEP
    share = tl.cdiv(tl.cdiv(k, UNIT), SPLIT_K) * UNIT
    from_k, to_k = split * share, tl.minimum(split * share + share, k)
    if PDL and piece > 0:
        first = first_ahead(from_k // 2, k // 2, piece, ASKED)
        ask_ahead(weight_ptr + tl.minimum(cols64, n - 1) * weight_stride, piece, ASKED, first)
    wait_for_inputs(PDL)
    x_ptrs = x_ptr + rows64[:, None] * x_stride + tl.arange(0, WIDTH)[None, :]  # [M, WIDTH]
    weight_ptrs = weight_ptr + cols64[:, None] * weight_stride + tl.arange(0, WIDTH // 2)[None, :]  # [N, WIDTH / 2]
    scales_ptrs = scales_ptr + cols64 * scales_stride
    float_zeros_ptrs = zeros_ptr + cols64 * zeros_stride if FLOAT_ZEROS else None
    zeros_ptrs = None if zeros_ptr is None or FLOAT_ZEROS else zeros_ptr + cols64 * zeros_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == 0:
        zeros = _zero_points(zeros_ptrs, col_mask, 0, BLOCK_N)
        for start in range(from_k, to_k, STEP):
            acc = _add_product(acc, x_ptrs, weight_ptrs, zeros, row_mask, col_mask, start, k, PTX, EVEN_K, WIDTH)
        if FLOAT_ZEROS:
            acc = _less_rest(acc, x_ptrs, float_zeros_ptrs, row_mask, col_mask, from_k, to_k - from_k, k, EVEN_K, WIDTH)
        acc *= tl.load(scales_ptrs, mask=col_mask, other=0.0).to(tl.float32)[:, None]
    elif GROUP <= STEP:
        for start in range(from_k, to_k, STEP):
            for part in tl.static_range(0, STEP, GROUP):
                first = start + part
                there = col_mask & (first + tl.zeros_like(cols) < k)
                zeros = _zero_points(zeros_ptrs, there, first // GROUP, BLOCK_N)
                product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                product = _add_product(product, x_ptrs, weight_ptrs, zeros, row_mask, col_mask, first, k, PTX, EVEN_K, WIDTH)
                if FLOAT_ZEROS:
                    rest_ptrs = float_zeros_ptrs + first // GROUP
                    product = _less_rest(product, x_ptrs, rest_ptrs, row_mask, there, first, GROUP, k, EVEN_K, WIDTH)
                scales = tl.load(scales_ptrs + first // GROUP, mask=there, other=0.0)
                acc += product * scales.to(tl.float32)[:, None]
    else:
        for first in range(from_k, to_k, GROUP):
            zeros = _zero_points(zeros_ptrs, col_mask, first // GROUP, BLOCK_N)
            product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for start in range(first, first + GROUP, STEP):
                product = _add_product(product, x_ptrs, weight_ptrs, zeros, row_mask, col_mask, start, k, PTX, EVEN_K, WIDTH)
            if FLOAT_ZEROS:
                rest_ptrs = float_zeros_ptrs + first // GROUP
                product = _less_rest(product, x_ptrs, rest_ptrs, row_mask, col_mask, first, GROUP, k, EVEN_K, WIDTH)
            scales = tl.load(scales_ptrs + first // GROUP, mask=col_mask, other=0.0)
            acc += product * scales.to(tl.float32)[:, None]
    acc = tl.trans(acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (split * num_tokens + rows64)[:, None] * out_stride + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def _zero_points(zeros_ptrs, mask, group, BLOCK_N: tl.constexpr):
    """The zero point of each output in one group, fp32 [N]."""
    if zeros_ptrs is None:
        zeros = tl.full((BLOCK_N,), 8.0, tl.float32)
    else:
        zeros = tl.load(zeros_ptrs + group, mask=mask, other=0).to(tl.float32)
    return zeros


@triton.jit
def _add_product(
    acc,
    x_ptrs,
    weight_ptrs,
    zeros,
    row_mask,
    col_mask,
    start,
    k,
    PTX: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``acc`` [N, M] and the product of WIDTH elements of k from ``start`` on, which is even."""
    x_mask, weight_mask = row_mask[:, None], col_mask[:, None]
    if not EVEN_K:
        x_mask = x_mask & (start + tl.arange(0, WIDTH) < k)[None, :]
        weight_mask = weight_mask & (start + 2 * tl.arange(0, WIDTH // 2) < k)[None, :]
    x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)  # 0 past k, whatever the weight is there
    packed = tl.load(weight_ptrs + start // 2, mask=weight_mask, other=0)
    low, high = halves(packed, x.dtype, PTX)
    shifted = (zeros + code_offset(x.dtype)).to(x.dtype)[:, None]
    weight = tl.join(low - shifted, high - shifted).reshape(low.shape[0], WIDTH)  # [N, WIDTH / 2, 2] before
    return tl.dot(weight, tl.trans(x), acc, input_precision="ieee")


@triton.jit
def _less_rest(
    product,
    x_ptrs,
    zeros_ptrs,
    row_mask,
    mask,
    first,
    length,
    k,
    EVEN_K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``product`` [N, M] of codes less 8, over ``length`` elements of k from ``first`` on, made one of codes less zero points."""
    sums = tl.zeros((row_mask.shape[0],), tl.float32)
    for start in range(first, first + length, WIDTH):
        x_mask = row_mask[:, None]
        if not EVEN_K:
            x_mask = x_mask & (start + tl.arange(0, WIDTH) < k)[None, :]
        sums += tl.sum(tl.load(x_ptrs + start, mask=x_mask, other=0.0).to(tl.float32), axis=1)
    rest = tl.load(zeros_ptrs, mask=mask, other=8.0) - 8.0
    return product - rest[:, None] * sums[None, :]
