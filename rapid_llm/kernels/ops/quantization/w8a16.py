"""Linear layer with a weight of one byte an element. Bound by the weight's bytes for few tokens, by arithmetic for many.

One program per (output tile, token tile), numbered so that neighbours share rows in the L2 cache. Bytes become numbers of x's
dtype in registers, exactly: int8 and e4m3 both fit bf16 and fp16. A scale therefore meets sums in fp32 and never a weight:
after the last of k where an output has one scale, after every group of k else. The weight is the left operand, which a matrix
instruction takes from registers.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.quantization.weight_only_inputs import check_w8a16_gemm
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_GROUP_M = 8  # token tiles whose programs run one after another before the next output tile
_MOST_STEP = 128  # elements of k that a step of the loop loads; a longer BLOCK_K holds a longer group


def w8a16_gemm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Write x @ (weight * scales).T (+ bias), accumulated in fp32 and rounded once, into ``out`` and return it. Copies nothing.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        weight: [n, k], int8 | float8_e4m3fn; inner stride 1, row stride free.
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
    tile = resolve_tiles(
        "w8a16_gemm", device=launch_device(x), dtype=x.dtype, block_k_multiple=1 if group == k else group,
        num_tokens=num_tokens, n=n, k=k, group=group,
    ).launch()  # fmt: skip
    step = min(tile.pop("BLOCK_K"), _MOST_STEP)
    is_e4m3 = weight.dtype == torch.float8_e4m3fn
    grid = (triton.cdiv(num_tokens, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),)
    _w8a16_gemm_kernel[grid](
        x, weight.view(torch.uint8) if is_e4m3 else weight, scales, bias, out,  # no e4m3 pointer: below sm89 there is none
        x.stride(0), weight.stride(0), scales.stride(0), out.stride(0), num_tokens, n, k,
        GROUP=0 if group == k else group, E4M3=is_e4m3, EVEN_K=k % step == 0, GROUP_M=_GROUP_M, STEP=step, **tile,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
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
    GROUP: tl.constexpr,
    E4M3: tl.constexpr,
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
    inner = tl.arange(0, WIDTH)
    x_ptrs = x_ptr + rows64[:, None] * x_stride + inner[None, :]  # [M, WIDTH]
    weight_ptrs = weight_ptr + cols64[:, None] * weight_stride + inner[None, :]  # [N, WIDTH]
    scales_ptrs = scales_ptr + cols64 * scales_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == 0:
        for start in range(0, k, STEP):
            acc = _add_product(acc, x_ptrs, weight_ptrs, row_mask, col_mask, start, k, E4M3, EVEN_K, WIDTH)
        acc *= tl.load(scales_ptrs, mask=col_mask, other=0.0)[:, None]
    elif GROUP <= STEP:
        for start in range(0, k, STEP):
            for part in tl.static_range(0, STEP, GROUP):
                first = start + part
                product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                product = _add_product(product, x_ptrs, weight_ptrs, row_mask, col_mask, first, k, E4M3, EVEN_K, WIDTH)
                there = col_mask & (first + tl.zeros_like(cols) < k)
                scales = tl.load(scales_ptrs + first // GROUP, mask=there, other=0.0)
                acc += product * scales[:, None]
    else:
        for first in range(0, k, GROUP):
            product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for start in range(first, first + GROUP, STEP):
                product = _add_product(product, x_ptrs, weight_ptrs, row_mask, col_mask, start, k, E4M3, EVEN_K, WIDTH)
            acc += product * tl.load(scales_ptrs + first // GROUP, mask=col_mask, other=0.0)[:, None]
    acc = tl.trans(acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows64[:, None] * out_stride + cols[None, :]
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
    E4M3: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``acc`` [N, M] and the product of WIDTH elements of k from ``start`` on."""
    x_mask, weight_mask = row_mask[:, None], col_mask[:, None]
    if not EVEN_K:
        left = (start + tl.arange(0, WIDTH) < k)[None, :]
        x_mask, weight_mask = x_mask & left, weight_mask & left
    x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
    weight = tl.load(weight_ptrs + start, mask=weight_mask, other=0)
    if E4M3:
        weight = _decoded(weight)
    return tl.dot(weight.to(x.dtype), tl.trans(x), acc, input_precision="ieee")


@triton.jit
def _decoded(weight):
    """Bytes of e4m3 as fp32, exactly.

    Exponent and mantissa go where fp32 has its own, so that a number comes out 2**-120 times what it is, for the biases of the
    exponents are 7 and 127. Subnormal bytes are subnormal there too, and one product with 2**120 puts all right. Only the two
    NaNs, which have no exponent of their own, are told apart.
    """
    bits = weight.to(tl.int32)
    shifted = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36)
