"""Linear layer: x @ weight.T (+ bias). Bound by the weight's bytes for few tokens, by arithmetic for many.

Three mappings. Many tokens: one program per (token tile, output tile), accumulated in fp32 over tiles of k; programs are numbered
so that neighbours share rows of x and of the weight in the L2 cache. Few tokens: one program per few outputs, whose warps share
out k, so that many programs have many bytes of the weight on their way each. One token: the same without a matrix instruction,
which would compute eight rows of which one is wanted.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.gemm.inputs import check_dense_gemm
from rapid_llm.kernels.ops.primitives.dependent_launch import (
    ask_ahead,
    dependent_launch,
    let_next_begin,
    pieces_ahead,
    wait_for_inputs,
)
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_GROUP_M = 8  # token tiles whose programs run one after another before the next output tile
_HELD = 512  # bytes of the weight that a thread may have on their way to its registers
_MOST_REGISTERS = 128  # a thread: eight programs of two warps, all that 4,096 outputs need of a card, are then in place at a time
_SWAPPED_BELOW = 64  # rows of the least warpgroup product: fewer tokens than that go on its other side


def dense_gemm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Write x @ weight.T (+ bias), accumulated in fp32 and rounded once, into ``out`` and return it. Copies nothing.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        weight: [n, k], same dtype; any strides. From sm90 on it may be read before the kernel launched last has ended, so it is
            not what that one writes.
        out: [num_tokens, n], same dtype and device, apart from x; inner stride 1, row stride free.
        bias: [n], same dtype, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/gemm.py::dense_gemm. Origin: this repo.
    """
    check_dense_gemm(x, weight, out, bias)
    (num_tokens, k), n = x.shape, weight.shape[0]
    if not num_tokens or not n:
        return out
    # One token's mapping reads rows of the weight, so they must be dense.
    tile_tokens = num_tokens if weight.stride(1) == 1 else max(num_tokens, 2)
    device = launch_device(x)
    tile = resolve_tiles("dense_gemm", device=device, dtype=x.dtype, num_tokens=tile_tokens, n=n, k=k).launch()
    block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
    even_k = k > 0 and k % tile["BLOCK_K"] == 0
    if block_m == 1:
        del tile["BLOCK_M"]
        _gemv_kernel[(triton.cdiv(n, block_n),)](
            x, weight, bias, out, weight.stride(0), n, k,
            EVEN=n % block_n == 0 and even_k, K_TILES=triton.cdiv(k, tile["BLOCK_K"]),
            AT_ONCE=max(_HELD // (block_n * tile["BLOCK_K"] * weight.element_size() // (32 * tile["num_warps"])), 1),
            **tile, maxnreg=_MOST_REGISTERS, **dependent_launch(device),
        )  # fmt: skip
        return out
    grid = (triton.cdiv(num_tokens, block_m) * triton.cdiv(n, block_n),)
    if "SPLIT_K" in tile:
        _few_tokens_kernel[grid](
            x, weight, bias, out, x.stride(0), weight.stride(0), weight.stride(1), out.stride(0), num_tokens, n, k,
            EVEN_K=even_k, **tile, **dependent_launch(device),
        )  # fmt: skip
        return out
    piece, pieces = pieces_ahead(weight, num_tokens, block_n)
    _dense_gemm_kernel[grid](
        x, weight, bias, out, x.stride(0), weight.stride(0), weight.stride(1), out.stride(0), num_tokens, n, k, piece,
        PIECES=pieces, EVEN_K=even_k, SWAPPED=block_m < _SWAPPED_BELOW, GROUP_M=_GROUP_M, **tile, **dependent_launch(device),
    )  # fmt: skip
    return out


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    weight_stride,
    n,
    k,
    EVEN: tl.constexpr,
    K_TILES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + cols.to(tl.int64)[:, None] * weight_stride + inner[None, :]  # [N, K]
    inside = (cols < n)[:, None]
    first = tl.load(weight_ptrs) if EVEN else tl.load(weight_ptrs, mask=inside & (inner < k)[None, :], other=0.0)
    wait_for_inputs(PDL)
    acc = first.to(tl.float32) * _row_of(x_ptr, inner, k, EVEN)
    if K_TILES <= AT_ONCE + 1:  # unrolled, so that many reads of the weight are on their way at a time
        for tile in tl.static_range(1, K_TILES):
            acc = _add_products(acc, x_ptr, weight_ptrs, inside, tile * BLOCK_K, inner, k, EVEN)
    else:
        for tile in tl.range(1, K_TILES, loop_unroll_factor=AT_ONCE):
            acc = _add_products(acc, x_ptr, weight_ptrs, inside, tile * BLOCK_K, inner, k, EVEN)
    result = tl.sum(acc, 1)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + cols, result.to(out_ptr.dtype.element_ty), mask=cols < n)


@triton.jit
def _add_products(acc, x_ptr, weight_ptrs, inside, start, inner, k, EVEN: tl.constexpr):
    """``acc`` [N, K] and the products of the tile at ``start``."""
    if EVEN:
        weight = tl.load(weight_ptrs + start)
    else:
        weight = tl.load(weight_ptrs + start, mask=inside & (start + inner < k)[None, :], other=0.0)
    return acc + weight.to(tl.float32) * _row_of(x_ptr, start + inner, k, EVEN)


@triton.jit
def _row_of(x_ptr, places, k, EVEN: tl.constexpr):
    """The token's numbers at some places, fp32 [1, K]; 0 past its end."""
    x = tl.load(x_ptr + places) if EVEN else tl.load(x_ptr + places, mask=places < k, other=0.0)
    return x.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_tokens", "piece"])
def _dense_gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    weight_stride_n,
    weight_stride_k,
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
    stride_k = tl.cast(weight_stride_k, tl.int64)

    if PDL and piece > 0:
        ask_ahead(weight_ptr + tl.minimum(cols64, n - 1) * weight_stride_n, piece, PIECES)
    wait_for_inputs(PDL)
    # Kept apart from the pointers: where strides are odd, a pointer of each element would live across the loop.
    x_offsets = rows64[:, None] * x_stride + inner[None, :]  # [M, K]
    weight_offsets = cols64[:, None] * weight_stride_n + inner[None, :] * stride_k  # [N, K]
    row_mask, col_mask = (rows < num_tokens)[:, None], (cols < n)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        x_mask, weight_mask = row_mask, col_mask
        if not EVEN_K:
            left = (start + inner < k)[None, :]
            x_mask, weight_mask = row_mask & left, col_mask & left
        x = tl.load(x_ptr + start + x_offsets, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptr + start * stride_k + weight_offsets, mask=weight_mask, other=0.0)
        if SWAPPED:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if SWAPPED:
        acc = tl.trans(acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows64[:, None] * out_stride + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask & (cols < n)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _few_tokens_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    weight_stride_n,
    weight_stride_k,
    out_stride,
    num_tokens,
    n,
    k,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_n = tl.cdiv(n, BLOCK_N)
    rows = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows64, cols64 = rows.to(tl.int64), cols.to(tl.int64)  # times a stride they can pass 2**31
    stride_k = tl.cast(weight_stride_k, tl.int64)
    wait_for_inputs(PDL)

    STEP: tl.constexpr = BLOCK_K // SPLIT_K
    inner = tl.arange(0, SPLIT_K)[:, None, None] * STEP + tl.arange(0, STEP)[None, None, :]  # a share of k for each warp
    x_ptrs = x_ptr + rows64[None, :, None] * x_stride + inner  # [SPLIT_K, M, STEP]
    weight_ptrs = weight_ptr + cols64[None, :, None] * weight_stride_n + inner * stride_k  # [SPLIT_K, N, STEP]
    row_mask, col_mask = (rows < num_tokens)[None, :, None], (cols < n)[None, :, None]
    acc = tl.zeros((SPLIT_K, BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, k, BLOCK_K):
        x_mask, weight_mask = row_mask, col_mask
        if not EVEN_K:
            x_mask, weight_mask = row_mask & (start + inner < k), col_mask & (start + inner < k)
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptrs + start * stride_k, mask=weight_mask, other=0.0)
        acc = tl.dot(weight, tl.trans(x, 0, 2, 1), acc, input_precision="ieee")
    result = tl.trans(tl.sum(acc, 0))  # [M, N]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows64[:, None] * out_stride + cols[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=(rows < num_tokens)[:, None] & (cols < n)[None, :])
