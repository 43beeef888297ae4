"""Product with a weight of 4-bit floating-point codes. Bound by the weight's bytes for few tokens, by arithmetic for many.

One program per (output tile, token tile), numbered so that neighbours share rows in the L2 cache, and several where these alone
would leave a card idle, each with a share of k. The weight is read in words of eight codes. Codes j and j + 4 of a word lie 16
bits apart, so that two shifts and a mask make two 16-bit numbers of them at once: a word becomes four pairs. Along k the product
therefore takes a step's elements in another order, all j = 0 first, and what is permuted is x, which is small where the weight
is what counts. A thread holds whole words: no weight passes between threads.

Sign, exponent and mantissa of a code go where bf16 (fp16) has its own; it is then 2**-126 (2**-14) times what it should be, and
code 1 a subnormal number, both of which one product puts right. Scales are multiplied to weights, since that is exact:

- e2m1 times e4m3 has 6 significant bits and lies between 2**-10 and 2,688: it fits bf16 and fp16.
- e2m1 times a power of two has 2. A quarter of it fits bf16 for every power, and fp32 sums are multiplied by 4. It need not fit
  fp16: activations of fp16 are cut into two bf16 numbers, exactly.

The weight is the left operand, which a matrix instruction takes from registers. One token: one program per few outputs, products
without a matrix instruction, for those would compute sixteen rows of which one is wanted.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.dependent_launch import (
    ask_ahead,
    dependent_launch,
    first_ahead,
    let_next_begin,
    pieces_ahead,
    wait_for_inputs,
)
from rapid_llm.kernels.ops.quantization.split_k import merge_parts
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_GROUP_M = 8  # token tiles whose programs run one after another before the next output tile


def launch_product(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    global_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Launch the product of ``op`` on tensors that its check has passed, and return ``out``.

    Args:
        op: "nvfp4_gemm", whose scales are e4m3, or "mxfp4_gemm", whose scales are exponents and whose global_scales are None.
        x, weight, scales, global_scales, bias, out: as there; from sm90 on the weight may be read before the kernel launched
            last has ended, so it is not what that one writes.
    """
    (num_tokens, k), n = x.shape, weight.shape[0]
    if not num_tokens or not n:
        return out
    group = k // scales.shape[1]
    device = launch_device(x)
    tile = resolve_tiles(op, device=device, dtype=x.dtype, block_k_multiple=group, num_tokens=num_tokens, n=n, k=k).launch()
    if global_scales is None and x.dtype == torch.float16:  # two bf16 numbers for each of x take twice the registers
        tile["BLOCK_K"] = max(tile["BLOCK_K"] // 2, group)
    words = weight.view(torch.int32)
    scale_bytes = scales if scales.dtype == torch.uint8 else scales.view(torch.int8)  # no e4m3 pointer: below sm89 there is none
    global_stride = 0 if global_scales is None else global_scales.stride(0)
    if tile["BLOCK_M"] == 1:
        del tile["BLOCK_M"]
        even = n % tile["BLOCK_N"] == 0 and k % tile["BLOCK_K"] == 0
        _fp4_gemv_kernel[(triton.cdiv(n, tile["BLOCK_N"]),)](
            x, words, scale_bytes, global_scales, bias, out, words.stride(0), scales.stride(0), global_stride, n, k,
            GROUP=group, EVEN=even, **tile, **dependent_launch(device),
        )  # fmt: skip
        return out
    splits = tile.setdefault("SPLIT_K", 1)
    piece, pieces = pieces_ahead(words, num_tokens, tile["BLOCK_N"], splits)
    target = out if splits == 1 else out.new_empty(splits * num_tokens, n, dtype=torch.float32)
    grid = (splits * triton.cdiv(num_tokens, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),)
    _fp4_gemm_kernel[grid](
        x, words, scale_bytes, global_scales, bias if splits == 1 else None, target,
        x.stride(0), words.stride(0), scales.stride(0), global_stride, target.stride(0), num_tokens, n, k, piece,
        PIECES=pieces, GROUP=group, EVEN_K=k % tile["BLOCK_K"] == 0, GROUP_M=_GROUP_M, **tile, **dependent_launch(device),
    )  # fmt: skip
    if splits > 1:
        merge_parts(target.view(splits, num_tokens, n), bias, out)
    return out


@triton.jit
def _fp4_gemv_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    global_scales_ptr,
    bias_ptr,
    out_ptr,
    words_stride,
    scales_stride,
    global_scales_stride,
    n,
    k,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols64, col_mask = cols.to(tl.int64), cols < n
    IS_E8M0: tl.constexpr = scales_ptr.dtype.element_ty == tl.uint8
    WORDS: tl.constexpr = BLOCK_K // 8
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    words_ptrs = words_ptr + cols64[:, None] * words_stride + tl.arange(0, WORDS)[None, :]  # [N, K / 8]
    scales_ptrs = scales_ptr + cols64[:, None] * scales_stride + tl.arange(0, GROUPS)[None, :]  # [N, K / GROUP]
    words = _gemv_words(words_ptrs, col_mask, 0, k, EVEN)
    wait_for_inputs(PDL)
    acc = tl.zeros((BLOCK_N, GROUPS), tl.float32)
    acc = _add_gemv_sums(acc, words, x_ptr, scales_ptrs, col_mask, 0, k, GROUP, EVEN)
    for start in range(BLOCK_K, k, BLOCK_K):
        words = _gemv_words(words_ptrs, col_mask, start, k, EVEN)
        acc = _add_gemv_sums(acc, words, x_ptr, scales_ptrs, col_mask, start, k, GROUP, EVEN)
    result = tl.sum(acc, 1)
    if IS_E8M0:
        result *= 4.0
    if global_scales_ptr is not None:
        result *= tl.load(global_scales_ptr + cols64 * global_scales_stride, mask=col_mask, other=0.0)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + cols, result.to(out_ptr.dtype.element_ty), mask=col_mask)


@triton.jit
def _gemv_words(words_ptrs, col_mask, start, k, EVEN: tl.constexpr):
    """Words of the step at ``start``, [N, WORDS]; 0 past k and past the last output."""
    if EVEN:
        words = tl.load(words_ptrs + start // 8)
    else:
        left = start + 8 * tl.arange(0, words_ptrs.shape[1]) < k
        words = tl.load(words_ptrs + start // 8, mask=col_mask[:, None] & left[None, :], other=0)
    return words


@triton.jit
def _add_gemv_sums(acc, words, x_ptr, scales_ptrs, col_mask, start, k, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """``acc`` [N, GROUPS] and the scaled sums of the products of the step at ``start``."""
    BLOCK_N: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    GROUPS: tl.constexpr = acc.shape[1]
    inner, groups = start + tl.arange(0, 8 * WORDS), tl.arange(0, GROUPS)
    if EVEN:
        x, scales = tl.load(x_ptr + inner), tl.load(scales_ptrs + start // GROUP)
    else:
        x = tl.load(x_ptr + inner, mask=inner < k, other=0.0)
        there = col_mask[:, None] & (start + GROUP * groups < k)[None, :]
        scales = tl.load(scales_ptrs + start // GROUP, mask=there, other=0)
    numbers = _decoded(words, False).to(tl.float32).reshape(BLOCK_N, 4, WORDS, 2)  # bf16 holds every code, whatever x is
    x = x.to(tl.float32).reshape(WORDS, 2, 4).permute(2, 0, 1)  # in the order of the codes
    sums = tl.sum(tl.sum(numbers * x[None, :, :, :], 3), 1)  # of a word, within a thread
    sums = tl.sum(sums.reshape(BLOCK_N, GROUPS, GROUP // 8), 2)
    return acc + sums * (_quarters(scales) if scales.dtype == tl.uint8 else _e4m3_values(scales))


@triton.jit(do_not_specialize=["num_tokens", "piece"])
def _fp4_gemm_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    global_scales_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    words_stride,
    scales_stride,
    global_scales_stride,
    out_stride,
    num_tokens,
    n,
    k,
    piece,
    PIECES: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
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
    rows64, cols64 = rows.to(tl.int64), cols.to(tl.int64)  # times a stride they can pass 2**31
    row_mask, col_mask = rows < num_tokens, cols < n
    share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLIT_K) * BLOCK_K

    if PDL and piece > 0:
        first = first_ahead(split * share // 2, k // 2, piece, PIECES)
        ask_ahead(words_ptr + tl.minimum(cols64, n - 1) * words_stride, piece, PIECES, first)
    wait_for_inputs(PDL)
    IS_E8M0: tl.constexpr = scales_ptr.dtype.element_ty == tl.uint8
    IN_FP16: tl.constexpr = x_ptr.dtype.element_ty == tl.float16 and not IS_E8M0
    WORDS: tl.constexpr = BLOCK_K // 8
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    x_ptrs = x_ptr + rows64[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]  # [M, K]
    words_ptrs = words_ptr + cols64[:, None] * words_stride + tl.arange(0, WORDS)[None, :]  # [N, K / 8]
    scales_ptrs = scales_ptr + cols64[:, None] * scales_stride + tl.arange(0, GROUPS)[None, :]  # [N, K / GROUP]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(split * share, tl.minimum(split * share + share, k), BLOCK_K):
        x_mask, words_mask, scales_mask = row_mask[:, None], col_mask[:, None], col_mask[:, None]
        if not EVEN_K:
            x_mask = x_mask & (start + tl.arange(0, BLOCK_K) < k)[None, :]
            words_mask = words_mask & (start + 8 * tl.arange(0, WORDS) < k)[None, :]
            scales_mask = scales_mask & (start + GROUP * tl.arange(0, GROUPS) < k)[None, :]
        words = tl.load(words_ptrs + start // 8, mask=words_mask, other=0)
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        scales = tl.load(scales_ptrs + start // GROUP, mask=scales_mask, other=0)

        numbers = _decoded(words, IN_FP16)  # [N, K]: codes 0 and 4 of each word, then 1 and 5 of each, and so on
        x = x.reshape(BLOCK_M, WORDS, 2, 4).permute(0, 3, 1, 2).reshape(BLOCK_M, BLOCK_K)  # in that order, too
        scales = (_quarters(scales) if IS_E8M0 else _e4m3_values(scales)).to(numbers.dtype)[:, None, :, None]
        weight = numbers * tl.broadcast_to(scales, (BLOCK_N, 4, GROUPS, GROUP // 4)).reshape(BLOCK_N, BLOCK_K)
        if IS_E8M0 and x.dtype == tl.float16:
            high, low = _halves(x)
            acc = tl.dot(weight, tl.trans(high), acc)
            acc = tl.dot(weight, tl.trans(low), acc)
        else:
            acc = tl.dot(weight.to(x.dtype), tl.trans(x), acc, input_precision="ieee")

    acc = tl.trans(acc)
    if IS_E8M0:
        acc *= 4.0
    if global_scales_ptr is not None:
        acc *= tl.load(global_scales_ptr + cols64 * global_scales_stride, mask=col_mask, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (split * num_tokens + rows64)[:, None] * out_stride + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def _decoded(words, IN_FP16: tl.constexpr):
    """Words [N, W] of eight codes as bf16 (fp16) numbers [N, 8 * W], in the order of x above."""
    BLOCK_N: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    LOWEST: tl.constexpr = 9 if IN_FP16 else 6  # where the one bit of a code's mantissa goes: the highest of the number's
    even = tl.join(_pair(words, 0, LOWEST), _pair(words, 2, LOWEST))
    odd = tl.join(_pair(words, 1, LOWEST), _pair(words, 3, LOWEST))
    pairs = tl.join(even, odd).reshape(BLOCK_N, WORDS, 4)
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).permute(0, 2, 1, 3).reshape(BLOCK_N, 8 * WORDS)
    DTYPE: tl.constexpr = tl.float16 if IN_FP16 else tl.bfloat16
    return both.to(DTYPE, bitcast=True) * (16384.0 if IN_FP16 else 8.507059173023462e37)  # 2**14, 2**126


@triton.jit
def _pair(words, CODE: tl.constexpr, LOWEST: tl.constexpr):
    """Codes ``CODE`` and ``CODE`` + 4 in the halves of a word: signs in the highest bits, the others from bit ``LOWEST`` on."""
    signs = (words << (12 - 4 * CODE)) & -0x7FFF8000
    sizes = words << (LOWEST - 4 * CODE) if LOWEST >= 4 * CODE else words >> (4 * CODE - LOWEST)
    return signs | (sizes & (0x00070007 << LOWEST))


@triton.jit
def _halves(x):
    """Two bf16 numbers whose sum is the fp16 one: its highest 8 significant bits and the others. Of an infinity, itself and 0."""
    whole = x.to(tl.float32)
    bits = whole.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    low = tl.where(bits & 0xFFFF == 0, 0.0, whole - (bits & -0x10000).to(tl.float32, bitcast=True))
    return high, low.to(tl.bfloat16)


@triton.jit
def _e4m3_values(scales):
    """Bytes of e4m3, sign-extended, as fp32, exactly.

    Exponent and mantissa go where fp32 has its own: 2**-120 times what they are, subnormal ones among them. Only the two NaNs,
    which have no exponent of their own, are told apart.
    """
    bits = scales.to(tl.int32)
    shifted = (bits << 20) & -0x78100000
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36)  # 2**120


@triton.jit
def _quarters(scales):
    """A quarter of 2 ** (byte - 127) as fp32, exactly; NaN of 255.

    The exponents 0 and 255 of fp32 stand for others. The highest bit of the mantissa makes 2**-127 of the one, NaN of the other.
    """
    exponents = scales.to(tl.int32)
    highest = tl.where((exponents + 1) & 254 == 0, 0x00400000, 0)
    return (exponents << 23 | highest).to(tl.float32, bitcast=True) * 0.25
