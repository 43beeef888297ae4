"""Feed-forwards of experts. Bound by the bytes of the experts that are hit for few tokens, by arithmetic for many.

Pairs of a token and an expert are brought together by expert (alignment.py), multiplied with gate and up into activations, then
with down into results (grouped_product.py, twice); last, each token sums its own results in the order of its columns. No atomics:
the same call gives the same bits. Intermediate rows are of x's dtype, one a pair.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.moe.alignment import pairs_by_expert
from rapid_llm.kernels.ops.moe.grouped_product import ExpertWeights, Routes, grouped_product
from rapid_llm.kernels.ops.moe.inputs import (
    BLOCK,
    MX_GROUP,
    check_fused_moe,
    check_fused_moe_fp8,
    check_fused_moe_mxfp4,
    check_fused_moe_w4a16,
    check_fused_moe_w8a16,
)
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_FEW = 4  # experts a pair, at least, where no two pairs are likely to meet: then nothing is sorted
_COLUMNS = 512  # of a program that sums
_QUANTISED = 1024  # elements of a row that are rounded to e4m3 together
_LEAST_SCALE = tl.constexpr(2.0**-100)  # of a row of zeros, so that a quotient is never 0 / 0

_Rounding = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def fused_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the sum over each token's experts of weight * down(silu(gate x) * up x), accumulated in fp32, into ``out``.

    Args:
        x: [num_tokens, hidden], fp32 | bf16 | fp16; inner stride 1, row stride free.
        gate_up: [num_experts, 2 * inner, hidden], dtype of x, gate rows first; inner stride 1, others free.
        down: [num_experts, hidden, inner], dtype of x; inner stride 1, others free.
        ids: [num_tokens, top_k], int32; inner stride 1, row stride free. One that is no expert's, such as -1, adds nothing.
        weights: [num_tokens, top_k], fp32; inner stride 1, row stride free.
        out: [num_tokens, hidden], dtype and device of x, apart from it; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/moe.py::fused_moe. Origin: this repo; experts' rows together in tiles as in Gale et al. 2022,
    https://arxiv.org/abs/2211.15841.
    """
    check_fused_moe(x, gate_up, down, ids, weights, out)
    return _mixture("fused_moe", x, ExpertWeights("dense", gate_up), ExpertWeights("dense", down), ids, weights, out)


def fused_moe_fp8(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """``fused_moe`` of e4m3 experts; x, and the activation as x's dtype holds it, are rounded to e4m3 with scales of their own.

    Args:
        x, ids, weights, out: as in ``fused_moe``.
        gate_up, down: float8_e4m3fn of the shapes there; inner stride 1, others free.
        gate_up_scales, down_scales: fp32: [num_experts, n], one an output, and a token has one; or
            [num_experts, ceil(n / 128), ceil(k / 128)], one a square of 128 x 128, and every 128 of k of a token have one; inner
            stride 1 then, others free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/moe.py::fused_moe_fp8. Origin: this repo; blocks as in DeepSeek-AI 2024,
    https://arxiv.org/abs/2412.19437.
    """
    group = check_fused_moe_fp8(x, gate_up, down, gate_up_scales, down_scales, ids, weights, out)
    square = BLOCK if group else 1
    first = ExpertWeights("fp8", gate_up, gate_up_scales, group=group, square=square)
    second = ExpertWeights("fp8", down, down_scales, group=group, square=square)

    def rounding(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _as_e4m3(rows, group)

    return _mixture("fused_moe_fp8", x, first, second, ids, weights, out, group=group, rounding=rounding)


def fused_moe_w8a16(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """``fused_moe`` of experts of a byte an element.

    Args:
        x, ids, weights, out: as in ``fused_moe``.
        gate_up, down: int8 | float8_e4m3fn, both, of the shapes there; inner stride 1, others free.
        gate_up_scales, down_scales: fp32 [num_experts, n], one an output; or [num_experts, n, groups] along k, inner stride 1,
            others free. A group is a power of two from 16 on.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/moe.py::fused_moe_w8a16. Origin: this repo.
    """
    groups = check_fused_moe_w8a16(x, gate_up, down, gate_up_scales, down_scales, ids, weights, out)
    kind = "int8" if gate_up.dtype == torch.int8 else "e4m3"
    first = ExpertWeights(kind, gate_up, gate_up_scales, group=groups[0])
    second = ExpertWeights(kind, down, down_scales, group=groups[1])
    return _mixture("fused_moe_w8a16", x, first, second, ids, weights, out, group=groups[0])


def fused_moe_w4a16(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor,
    gate_up_zeros: torch.Tensor | None = None,
    down_zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """``fused_moe`` of experts of 4-bit codes.

    Args:
        x, ids, weights, out: as in ``fused_moe``.
        gate_up, down: [num_experts, 2 * inner, hidden / 2] and [num_experts, hidden, inner / 2], uint8, two codes a byte: element
            2i in the low half, 2i + 1 in the high one; inner stride 1, others free.
        gate_up_scales, down_scales: [num_experts, n, groups] along k, dtype of x or fp32; inner stride 1, others free. A group is
            a power of two from 16 to 1024, or all of k ([num_experts, n] says so too).
        gate_up_zeros, down_zeros: uint8 of the scales' shapes, the code that stands for 0; strides as there. None is 8.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/moe.py::fused_moe_w4a16. Origin: this repo.
    """
    groups = check_fused_moe_w4a16(x, gate_up, down, gate_up_scales, down_scales, ids, weights, out, gate_up_zeros, down_zeros)
    first = ExpertWeights("int4", gate_up, gate_up_scales, gate_up_zeros, groups[0])
    second = ExpertWeights("int4", down, down_scales, down_zeros, groups[1])
    return _mixture("fused_moe_w4a16", x, first, second, ids, weights, out, group=groups[0])


def fused_moe_mxfp4(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """``fused_moe`` of experts of e2m1 codes with a power of two for every 32 along k.

    Args:
        x, ids, weights, out: as in ``fused_moe``.
        gate_up, down: [num_experts, 2 * inner, hidden / 2] and [num_experts, hidden, inner / 2], uint8, two codes a byte: element
            2i in the low half, 2i + 1 in the high one; inner stride 1, others free.
        gate_up_scales, down_scales: [num_experts, n, ceil(k / 32)], uint8: 2 ** (byte - 127), NaN for 255; inner stride 1, others
            free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/moe.py::fused_moe_mxfp4. Origin: this repo; the format is that of Rouhani et al. 2023,
    https://arxiv.org/abs/2310.10537.
    """
    check_fused_moe_mxfp4(x, gate_up, down, gate_up_scales, down_scales, ids, weights, out)
    first = ExpertWeights("mxfp4", gate_up, gate_up_scales, group=MX_GROUP)
    second = ExpertWeights("mxfp4", down, down_scales, group=MX_GROUP)
    return _mixture("fused_moe_mxfp4", x, first, second, ids, weights, out)


def _mixture(
    op: str,
    x: torch.Tensor,
    first: ExpertWeights,
    second: ExpertWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    group: int | None = None,
    rounding: _Rounding | None = None,
) -> torch.Tensor:
    """The launches of ``op``. ``group`` is a size of it where it has one; ``rounding`` gives codes and scales of activations."""
    (num_tokens, hidden), top_k, num_experts = x.shape, ids.shape[1], first.codes.shape[0]
    if not num_tokens:
        return out
    inner, num_pairs = first.codes.shape[1] // 2, num_tokens * top_k
    device = launch_device(x)
    tile = resolve_tiles(
        op, device=device, dtype=x.dtype, num_tokens=num_tokens, num_experts=num_experts, top_k=top_k,
        hidden_size=hidden, intermediate_size=inner, **({} if group is None else {"group": group}),
    ).launch()  # fmt: skip
    if num_tokens == 1 or _FEW * num_pairs <= num_experts:
        routes = Routes(ids, weights, None, None, num_pairs)
    else:
        pairs, tiles = pairs_by_expert(ids, num_experts, tile["BLOCK_M"])
        routes = Routes(ids, weights, pairs, tiles, tiles.shape[0])
    activations, results = x.new_empty((num_pairs, inner)), x.new_empty((num_pairs, hidden))
    rows, scales = (x, None) if rounding is None else rounding(x)
    grouped_product(rows, first, routes, tile, out=activations, gated=True, x_scales=scales)
    rows, scales = (activations, None) if rounding is None else rounding(activations)
    grouped_product(rows, second, routes, tile, out=results, gated=False, x_scales=scales)
    _sum_kernel[(num_tokens, triton.cdiv(hidden, _COLUMNS))](
        results, ids, out, results.stride(0), ids.stride(0), out.stride(0), num_experts, hidden,
        TOP_K=top_k, COLUMNS=_COLUMNS, num_warps=2, num_stages=1, **dependent_launch(device),
    )  # fmt: skip
    return out


def _as_e4m3(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes e4m3 [R, k] and fp32 scales [R], or [R, ceil(k / group)]."""
    count, k = rows.shape
    codes = rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty((count, triton.cdiv(k, group)) if group else (count,), dtype=torch.float32)
    grid = (count, triton.cdiv(k, _QUANTISED) if group else 1)
    _quantise_kernel[grid](
        rows, codes, scales, rows.stride(0), codes.stride(0), scales.stride(0), k, GROUP=group, WIDTH=_QUANTISED,
        num_warps=4, num_stages=1, **dependent_launch(launch_device(rows)),
    )  # fmt: skip
    return codes, scales


@triton.jit
def _quantise_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    codes_stride,
    scales_stride,
    k,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr, codes_row_ptr, scales_row_ptr = (
        x_ptr + row * x_stride,
        codes_ptr + row * codes_stride,
        scales_ptr + row * scales_stride,
    )
    if GROUP == 0:
        largest = 0.0
        for start in range(0, k, WIDTH):
            cols = start + tl.arange(0, WIDTH)
            largest = tl.maximum(largest, _largest(tl.load(x_row_ptr + cols, mask=cols < k, other=0.0), 0))
        scale = _scale_of(largest)
        tl.store(scales_row_ptr, scale)
        for start in range(0, k, WIDTH):
            cols = start + tl.arange(0, WIDTH)
            codes = _code_of(tl.load(x_row_ptr + cols, mask=cols < k, other=0.0), scale)
            tl.store(codes_row_ptr + cols, codes.to(codes_ptr.dtype.element_ty), mask=cols < k)
    else:
        groups = tl.program_id(1) * (WIDTH // GROUP) + tl.arange(0, WIDTH // GROUP)
        cols = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(x_row_ptr + cols, mask=cols < k, other=0.0)
        scales = _scale_of(_largest(x, 1))
        tl.store(scales_row_ptr + groups, scales, mask=groups * GROUP < k)
        tl.store(codes_row_ptr + cols, _code_of(x, scales[:, None]).to(codes_ptr.dtype.element_ty), mask=cols < k)


@triton.jit
def _largest(x, AXIS: tl.constexpr):
    """The largest size along an axis, in fp32; NaNs are passed over."""
    sizes = tl.abs(x.to(tl.float32))
    return tl.max(tl.where(sizes == sizes, sizes, 0.0), AXIS)


@triton.jit
def _scale_of(largest):
    return tl.maximum(tl.div_rn(largest, 448.0), _LEAST_SCALE)


@triton.jit
def _code_of(x, scale):
    """fp32 values within what e4m3 holds; NaN stays NaN."""
    quotients = tl.div_rn(x.to(tl.float32), scale + tl.zeros_like(x).to(tl.float32))
    bounded = tl.minimum(tl.maximum(quotients, -448.0), 448.0)
    return tl.where(quotients == quotients, bounded, quotients)


@triton.jit
def _sum_kernel(
    results_ptr,
    ids_ptr,
    out_ptr,
    results_stride,
    ids_stride,
    out_stride,
    num_experts,
    hidden,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < hidden
    total = tl.zeros((COLUMNS,), tl.float32)
    for column in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * ids_stride + column)
        experts = expert + tl.zeros_like(cols)
        there = inside & (experts >= 0) & (experts < num_experts)
        total += tl.load(results_ptr + (token * TOP_K + column) * results_stride + cols, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_stride + cols, total.to(out_ptr.dtype.element_ty), mask=inside)
