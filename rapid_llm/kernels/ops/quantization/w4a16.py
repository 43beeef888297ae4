"""Linear layer with a weight of 4-bit codes. Bound by the weight's bytes for few tokens, by arithmetic for many.

One program per (output tile, token tile), numbered so that neighbours share rows in the L2 cache. Two codes of a byte become two
neighbours of x's dtype in registers, zero point taken off: whole numbers of at most 15 in size, which are exact. A scale
therefore meets sums in fp32 and never a weight: after the last of k where an output has one scale, after every group of k else.
The weight is the left operand, which a matrix instruction takes from registers.

A zero point that is no whole number cannot be taken off a code exactly in 16 bits. There 8 is taken off, and what a zero point
differs from 8 meets the group's sum of x, both in fp32.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.quantization.weight_only_inputs import check_w4a16_gemm
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_GROUP_M = 8  # token tiles whose programs run one after another before the next output tile
_MOST_STEP = 128  # elements of k that a step of the loop loads; a longer BLOCK_K holds a longer group


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
            stride free.
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
    tile = resolve_tiles(
        "w4a16_gemm", device=launch_device(x), dtype=x.dtype, block_k_multiple=1 if group == k else group,
        num_tokens=num_tokens, n=n, k=k, group=group,
    ).launch()  # fmt: skip
    step = min(tile.pop("BLOCK_K"), _MOST_STEP)
    grid = (triton.cdiv(num_tokens, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),)
    _w4a16_gemm_kernel[grid](
        x, weight, scales, zeros, bias, out,
        x.stride(0), weight.stride(0), scales.stride(0), 0 if zeros is None else zeros.stride(0), out.stride(0),
        num_tokens, n, k,
        FLOAT_ZEROS=zeros is not None and zeros.dtype == torch.float32,
        GROUP=0 if group == k else group, EVEN_K=k % step == 0, GROUP_M=_GROUP_M, STEP=step, **tile,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
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
    FLOAT_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # GROUP_M token tiles, then the next output tile, so that both operands are read from L2.
    tiles_m, tiles_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first_m = tl.program_id(0) // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    rows = (first_m + within % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (within // group_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows64, cols64 = rows.to(tl.int64), cols.to(tl.int64)  # times a stride they can pass 2**31
    row_mask, col_mask = rows < num_tokens, cols < n

    # A product never reaches past its group.
    WIDTH: tl.constexpr = GROUP if GROUP != 0 and GROUP < STEP else STEP
    x_ptrs = x_ptr + rows64[:, None] * x_stride + tl.arange(0, WIDTH)[None, :]  # [M, WIDTH]
    weight_ptrs = weight_ptr + cols64[:, None] * weight_stride + tl.arange(0, WIDTH // 2)[None, :]  # [N, WIDTH / 2]
    scales_ptrs = scales_ptr + cols64 * scales_stride
    float_zeros_ptrs = zeros_ptr + cols64 * zeros_stride if FLOAT_ZEROS else None
    zeros_ptrs = None if zeros_ptr is None or FLOAT_ZEROS else zeros_ptr + cols64 * zeros_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == 0:
        zeros = _zero_points(zeros_ptrs, col_mask, 0, BLOCK_N)
        for start in range(0, k, STEP):
            acc = _add_product(acc, x_ptrs, weight_ptrs, zeros, row_mask, col_mask, start, k, EVEN_K, WIDTH)
        if FLOAT_ZEROS:
            acc = _less_rest(acc, x_ptrs, float_zeros_ptrs, row_mask, col_mask, 0, k, k, EVEN_K, WIDTH)
        acc *= tl.load(scales_ptrs, mask=col_mask, other=0.0).to(tl.float32)[:, None]
    elif GROUP <= STEP:
        for start in range(0, k, STEP):
            for part in tl.static_range(0, STEP, GROUP):
                first = start + part
                there = col_mask & (first + tl.zeros_like(cols) < k)
                zeros = _zero_points(zeros_ptrs, there, first // GROUP, BLOCK_N)
                product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                product = _add_product(product, x_ptrs, weight_ptrs, zeros, row_mask, col_mask, first, k, EVEN_K, WIDTH)
                if FLOAT_ZEROS:
                    rest_ptrs = float_zeros_ptrs + first // GROUP
                    product = _less_rest(product, x_ptrs, rest_ptrs, row_mask, there, first, GROUP, k, EVEN_K, WIDTH)
                scales = tl.load(scales_ptrs + first // GROUP, mask=there, other=0.0)
                acc += product * scales.to(tl.float32)[:, None]
    else:
        for first in range(0, k, GROUP):
            zeros = _zero_points(zeros_ptrs, col_mask, first // GROUP, BLOCK_N)
            product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for start in range(first, first + GROUP, STEP):
                product = _add_product(product, x_ptrs, weight_ptrs, zeros, row_mask, col_mask, start, k, EVEN_K, WIDTH)
            if FLOAT_ZEROS:
                rest_ptrs = float_zeros_ptrs + first // GROUP
                product = _less_rest(product, x_ptrs, rest_ptrs, row_mask, col_mask, first, GROUP, k, EVEN_K, WIDTH)
            scales = tl.load(scales_ptrs + first // GROUP, mask=col_mask, other=0.0)
            acc += product * scales.to(tl.float32)[:, None]
    acc = tl.trans(acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows64[:, None] * out_stride + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def _zero_points(zeros_ptrs, mask, group, BLOCK_N: tl.constexpr):
    """The zero point of each output in one group, int8 [N]."""
    return tl.full((BLOCK_N,), 8, tl.int8) if zeros_ptrs is None else tl.load(zeros_ptrs + group, mask=mask, other=0).to(tl.int8)


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
    low, high = (packed & 15).to(tl.int8), (packed >> 4).to(tl.int8)
    codes = tl.join(low - zeros[:, None], high - zeros[:, None])  # [N, WIDTH / 2, 2]
    weight = codes.reshape(codes.shape[0], WIDTH).to(x.dtype)
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
