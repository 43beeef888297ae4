"""Linear layer with a weight of one byte an element. Bound by the weight's bytes for few tokens, by arithmetic for many.

One program per (output tile, token tile), numbered so that neighbours share rows in the L2 cache, and several where these alone
would leave a card idle, each with a share of k. Bytes become numbers of x's dtype in registers, exactly: int8 and e4m3 both fit
bf16 and fp16. A scale therefore meets sums in fp32 and never a weight: after the last of k where an output has one scale, after
every group of k else. The weight is the left operand, which a matrix instruction takes from registers. One token: one program
per few outputs, products without a matrix instruction, for those would compute sixteen rows of which one is wanted.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.codes import e4m3_numbers, has_inline_ptx, int8_numbers
from rapid_llm.kernels.ops.primitives.dependent_launch import (
    ask_ahead,
    dependent_launch,
    first_ahead,
    let_next_begin,
    pieces_ahead,
    wait_for_inputs,
)
from rapid_llm.kernels.ops.quantization.split_k import merge_parts
from rapid_llm.kernels.ops.quantization.weight_only_inputs import check_w8a16_gemm
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_GROUP_M = 8  # token tiles whose programs run one after another before the next output tile
_MOST_STEP = 128  # elements of k that a step of the loop loads; a longer BLOCK_K holds a longer group
_MOST_GEMV_STEP = 2048  # the same for one token


def w8a16_gemm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Write x @ (weight * scales).T (+ bias), accumulated in fp32 and rounded once, into ``out`` and return it. Copies nothing.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        weight: [n, k], int8 | float8_e4m3fn; inner stride 1, row stride free. From sm90 on it may be read before the kernel
            launched last has ended, so it is not what that one writes.
        scales: fp32: [n], one an output, any stride; or [n, k / group], inner stride 1. A group is a power of two from 16 on.
        out: [num_tokens, n], dtype and device of x, apart from it; inner stride 1, row stride free.
        bias: [n], dtype of x, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/quantization/weight_only.py::w8a16_gemm. Origin: this repo; int8 weights as in Dettmers et al. 2022,
    https://arxiv.org/abs/2208.07339, e4m3 as in Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433.
    """
    group = check_w8a16_gemm(x, weight, scales, out, bias)
    (num_tokens, k), n = x.shape, weight.shape[0]
    if not num_tokens or not n:
        return out
    device = launch_device(x)
    tile = resolve_tiles(
        "w8a16_gemm", device=device, dtype=x.dtype, block_k_multiple=1 if group == k else group,
        num_tokens=num_tokens, n=n, k=k, group=group,
    ).launch()  # fmt: skip
    is_e4m3 = weight.dtype == torch.float8_e4m3fn
    is_coded = is_e4m3 and not device.native_fp8  # below sm89 no kernel may take an e4m3 pointer
    codes, grouped = weight.view(torch.uint8) if is_coded else weight, 0 if group == k else group
    block_m, block_n, block_k = (tile.pop(name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    if block_m == 1:
        step = min(block_k, _MOST_GEMV_STEP)
        _w8a16_gemv_kernel[(triton.cdiv(n, block_n),)](
            x, codes, scales, bias, out, weight.stride(0), scales.stride(0), n, k,
            GROUP=grouped, INT8=not is_e4m3, CODED=is_coded, PTX=has_inline_ptx(), EVEN=n % block_n == 0 and k % step == 0,
            BLOCK_N=block_n, STEP=step, **tile, **dependent_launch(device),
        )  # fmt: skip
        return out
    splits, step = tile.setdefault("SPLIT_K", 1), min(block_k, _MOST_STEP)
    piece, pieces = pieces_ahead(codes, num_tokens, block_n, splits)
    target = out if splits == 1 else out.new_empty(splits * num_tokens, n, dtype=torch.float32)
    grid = (splits * triton.cdiv(num_tokens, block_m) * triton.cdiv(n, block_n),)
    _w8a16_gemm_kernel[grid](
        x, codes, scales, bias if splits == 1 else None, target,
        x.stride(0), weight.stride(0), scales.stride(0), target.stride(0), num_tokens, n, k, piece,
        PIECES=pieces, GROUP=grouped, CODED=is_coded, EVEN_K=k % step == 0, GROUP_M=_GROUP_M, STEP=step,
        BLOCK_M=block_m, BLOCK_N=block_n, **tile, **dependent_launch(device),
    )  # fmt: skip
    if splits > 1:
        merge_parts(target.view(splits, num_tokens, n), bias, out)
    return out


@triton.jit
def _w8a16_gemv_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    weight_stride,
    scales_stride,
    n,
    k,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    CODED: tl.constexpr,
    PTX: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols64, col_mask = cols.to(tl.int64), cols < n
    weight_ptrs = weight_ptr + cols64[:, None] * weight_stride + tl.arange(0, STEP)[None, :]  # [N, STEP]
    # Sixteen neighbours are added up within a thread, which loads as many bytes at once; then they meet the scale they share.
    GROUPS: tl.constexpr = 1 if GROUP == 0 or GROUP > STEP else STEP // GROUP
    PIECES: tl.constexpr = STEP // GROUPS // 16
    scales_ptrs = scales_ptr + cols64[:, None] * scales_stride + tl.arange(0, GROUPS)[None, :]  # [N, GROUPS]
    codes = _gemv_codes(weight_ptrs, col_mask, 0, k, EVEN)
    wait_for_inputs(PDL)
    acc = tl.zeros((BLOCK_N, GROUPS, PIECES), tl.float32)
    acc = _add_gemv_sums(acc, codes, x_ptr, scales_ptrs, col_mask, 0, k, GROUP, INT8, CODED, PTX, EVEN)
    for start in range(STEP, k, STEP):
        codes = _gemv_codes(weight_ptrs, col_mask, start, k, EVEN)
        acc = _add_gemv_sums(acc, codes, x_ptr, scales_ptrs, col_mask, start, k, GROUP, INT8, CODED, PTX, EVEN)
    result = tl.sum(tl.sum(acc, 2), 1)
    if GROUP == 0:
        result *= tl.load(scales_ptr + cols64 * scales_stride, mask=col_mask, other=0.0)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + cols, result.to(out_ptr.dtype.element_ty), mask=col_mask)


@triton.jit
def _gemv_codes(weight_ptrs, col_mask, start, k, EVEN: tl.constexpr):
    """Codes of the step at ``start``, [N, STEP]; 0 past k and past the last output."""
    if EVEN:
        codes = tl.load(weight_ptrs + start)
    else:
        left = start + tl.arange(0, weight_ptrs.shape[1]) < k
        codes = tl.load(weight_ptrs + start, mask=col_mask[:, None] & left[None, :], other=0.0)
    return codes


@triton.jit
def _add_gemv_sums(
    acc,
    codes,
    x_ptr,
    scales_ptrs,
    col_mask,
    start,
    k,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    CODED: tl.constexpr,
    PTX: tl.constexpr,
    EVEN: tl.constexpr,
):
    """``acc`` [N, GROUPS, PIECES] and the sums of the products of the step at ``start``, scaled where groups have scales."""
    inner, groups = start + tl.arange(0, codes.shape[1]), tl.arange(0, acc.shape[1])
    x = tl.load(x_ptr + inner) if EVEN else tl.load(x_ptr + inner, mask=inner < k, other=0.0)
    numbers = e4m3_numbers(codes) if CODED else int8_numbers(codes, PTX) if INT8 else codes.to(tl.float32)
    sums = tl.sum((numbers * x.to(tl.float32)[None, :]).reshape(acc.shape[0], acc.shape[1], acc.shape[2], 16), 3)
    if GROUP != 0:
        there = col_mask[:, None] & (start + groups * GROUP < k)[None, :]
        sums *= tl.load(scales_ptrs + start // GROUP, mask=there, other=0.0)[:, :, None]
    return acc + sums


@triton.jit(do_not_specialize=["num_tokens", "piece"])
def _w8a16_gemm_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    weight_stride,
    scales_stride,
    out_stride,
    num_tokens,
    n,
    k,
    piece,
    PIECES: tl.constexpr,
    GROUP: tl.constexpr,
    CODED: tl.constexpr,
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
        first = first_ahead(from_k, k, piece, PIECES)
        ask_ahead(weight_ptr + tl.minimum(cols64, n - 1) * weight_stride, piece, PIECES, first)
    wait_for_inputs(PDL)
    x_ptrs = x_ptr + rows64[:, None] * x_stride + tl.arange(0, WIDTH)[None, :]  # [M, WIDTH]
    weight_ptrs = weight_ptr + cols64[:, None] * weight_stride + tl.arange(0, WIDTH)[None, :]  # [N, WIDTH]
    scales_ptrs = scales_ptr + cols64 * scales_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == 0:
        for start in range(from_k, to_k, STEP):
            acc = _add_product(acc, x_ptrs, weight_ptrs, row_mask, col_mask, start, k, CODED, EVEN_K, WIDTH)
        acc *= tl.load(scales_ptrs, mask=col_mask, other=0.0)[:, None]
    elif GROUP <= STEP:
        for start in range(from_k, to_k, STEP):
            for part in tl.static_range(0, STEP, GROUP):
                first = start + part
                product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                product = _add_product(product, x_ptrs, weight_ptrs, row_mask, col_mask, first, k, CODED, EVEN_K, WIDTH)
                there = col_mask & (first + tl.zeros_like(cols) < k)
                scales = tl.load(scales_ptrs + first // GROUP, mask=there, other=0.0)
                acc += product * scales[:, None]
    else:
        for first in range(from_k, to_k, GROUP):
            product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for start in range(first, first + GROUP, STEP):
                product = _add_product(product, x_ptrs, weight_ptrs, row_mask, col_mask, start, k, CODED, EVEN_K, WIDTH)
            acc += product * tl.load(scales_ptrs + first // GROUP, mask=col_mask, other=0.0)[:, None]
    acc = tl.trans(acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (split * num_tokens + rows64)[:, None] * out_stride + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def _add_product(
    acc,
    x_ptrs,
    weight_ptrs,
    row_mask,
    col_mask,
    start,
    k,
    CODED: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``acc`` [N, M] and the product of WIDTH elements of k from ``start`` on."""
    x_mask, weight_mask = row_mask[:, None], col_mask[:, None]
    if not EVEN_K:
        left = (start + tl.arange(0, WIDTH) < k)[None, :]
        x_mask, weight_mask = x_mask & left, weight_mask & left
    x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
    weight = tl.load(weight_ptrs + start, mask=weight_mask, other=0.0)
    if CODED:
        weight = e4m3_numbers(weight)
    return tl.dot(weight.to(x.dtype), tl.trans(x), acc, input_precision="ieee")
