"""The products of experts with the rows of tokens that go to them: one kernel, into which each weight format plugs its decoder.

A program computes one tile of rows of one expert times one tile of that expert's outputs. For few pairs each pair is its own tile
of one row, and nothing is sorted; else tiles come from alignment.py, and programs behind the last tile return at once. Programs
are numbered so that tiles of one expert share its weight, and tiles of outputs the rows, in the L2 cache.

Codes become numbers of x's dtype in registers, exactly, so that a scale meets sums in fp32 and never a weight, unless it is a
power of two. A gated product has gate and up rows of the weight by turns in one tile: neighbours in the accumulator are what
SwiGLU multiplies.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.codes import code_offset, e4m3_numbers, halves, has_inline_ptx
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs

_GROUP_M = 8  # tiles of rows whose programs run one after another before the next tile of outputs
_SWAPPED_BELOW = 64  # rows of the least warpgroup product: fewer than that go on its other side
_MOST_STEP = 128  # elements of k that a step of the loop loads
_FROM_REGISTERS = ("int8", "e4m3", "int4", "mxfp4")  # decoded there: such a weight is the left operand, which may stay there


@dataclass(frozen=True)
class ExpertWeights:
    """One product of every expert, as it is stored.

    Attributes:
        kind: "dense", or how the bytes are read: "int8", "e4m3", "int4", "mxfp4"; or "fp8", multiplied as it is.
        codes: [num_experts, n, k], or k / 2 where two are in a byte; inner stride 1.
        scales: [num_experts, n / square] or [num_experts, n / square, k / group], rounded up; None is 1.
        zeros: of the scales' shape, for int4; None is 8.
        group, square: elements along k, 0 being all, and outputs that share a scale.
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    group: int = 0
    square: int = 1


@dataclass(frozen=True)
class Routes:
    """Who goes where.

    Attributes:
        ids, weights: [num_tokens, top_k], int32 and fp32.
        pairs, tiles: as ``alignment.pairs_by_expert`` gives them; None where each pair is a tile.
        num_tiles: how many tiles there are at most.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    pairs: torch.Tensor | None
    tiles: torch.Tensor | None
    num_tiles: int


def grouped_product(
    x: torch.Tensor,
    experts: ExpertWeights,
    routes: Routes,
    tile: dict[str, int],
    *,
    out: torch.Tensor,
    gated: bool,
    x_scales: torch.Tensor | None = None,
) -> None:
    """Write rows of ``out``, one a pair; those of pairs that go nowhere are left as they are.

    Args:
        x: [num_tokens, k] where ``gated``, else [num_pairs, k]; inner stride 1.
        tile: BLOCK_M, that of the routes, BLOCK_N in rows of the weight, BLOCK_K, num_warps, num_stages.
        out: [num_pairs, inner]: silu(gate x) * up x; or [num_pairs, n]: the product times the pair's weight. Inner stride 1.
        x_scales: fp32 [rows of x], or [rows of x, k / group], of an x of e4m3.
    """
    weight, scales, zeros = experts.codes, experts.scales, experts.zeros
    k, n = x.shape[1], out.shape[1]
    tile = dict(tile)
    step = min(tile.pop("BLOCK_K"), _MOST_STEP)
    cols = tile["BLOCK_N"] // 2 if gated else tile["BLOCK_N"]
    group = experts.group
    if experts.kind == "mxfp4" and x.dtype != torch.float16:
        group = 0  # a power of two meets the weight, which holds it, as fp16 would not
    kind, device = experts.kind, launch_device(x)
    if kind == "e4m3" and device.native_fp8:
        kind = "dense"  # the cast to x's dtype decodes it
    elif kind == "e4m3":
        weight = weight.view(torch.uint8)  # no e4m3 pointer: below sm89 there is none
    _grouped_product_kernel[(routes.num_tiles * triton.cdiv(n, cols),)](
        x, weight, scales, zeros, x_scales, routes.ids, routes.weights, routes.pairs, routes.tiles, out,
        x.stride(0), weight.stride(0), weight.stride(1), *_two_strides(scales), *_two_strides(zeros),
        0 if x_scales is None else x_scales.stride(0), routes.ids.stride(0), routes.weights.stride(0), out.stride(0),
        routes.num_tiles, weight.shape[0], n, k,
        KIND=kind, PTX=has_inline_ptx(), GROUP=group, SQUARE=experts.square, GATED=gated, TOP_K=routes.ids.shape[1],
        EVEN_K=k % step == 0, SWAPPED=experts.kind in _FROM_REGISTERS or tile["BLOCK_M"] < _SWAPPED_BELOW, GROUP_M=_GROUP_M,
        STEP=step, **tile, **dependent_launch(device),
    )  # fmt: skip


def _two_strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_product_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    x_scales_ptr,
    ids_ptr,
    shares_ptr,
    pairs_ptr,
    tiles_ptr,
    out_ptr,
    x_stride,
    weight_stride_e,
    weight_stride_n,
    scales_stride_e,
    scales_stride_n,
    zeros_stride_e,
    zeros_stride_n,
    x_scales_stride,
    ids_stride,
    shares_stride,
    out_stride,
    num_tiles,
    num_experts,
    n,
    k,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
    GROUP: tl.constexpr,
    SQUARE: tl.constexpr,
    GATED: tl.constexpr,
    TOP_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP_M: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    # GROUP_M tiles of rows, then the next tile of outputs, so that both operands are read from L2.
    COLS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tiles_n = tl.cdiv(n, COLS)
    first_tile = tl.program_id(0) // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(num_tiles - first_tile, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    tile = first_tile + within % group_m
    first_col = (within // group_m) * COLS

    lanes = tl.arange(0, BLOCK_M)
    if pairs_ptr is None:
        expert = tl.load(ids_ptr + (tile // TOP_K).to(tl.int64) * ids_stride + tile % TOP_K)
        row_mask = lanes < 1
        pairs = tile + tl.zeros_like(lanes)
    else:
        tile_ptr = tiles_ptr + tile.to(tl.int64) * 3
        expert, places = tl.load(tile_ptr), tl.load(tile_ptr + 1) + lanes
        row_mask = places < tl.load(tile_ptr + 2)
        pairs = tl.load(pairs_ptr + places, mask=row_mask, other=0)
    if (expert < 0) | (expert >= num_experts):
        return
    expert64, pairs64, tokens64 = expert.to(tl.int64), pairs.to(tl.int64), (pairs // TOP_K).to(tl.int64)
    x_rows = tokens64 if GATED else pairs64

    outputs = tl.arange(0, BLOCK_N)
    if GATED:  # gate and up rows by turns
        cols = first_col + outputs // 2
        weight_rows = (cols + outputs % 2 * n).to(tl.int64)
    else:
        cols = first_col + outputs
        weight_rows = cols.to(tl.int64)
    col_mask = cols < n

    # A product never reaches past its group.
    WIDTH: tl.constexpr = GROUP if GROUP != 0 and GROUP < STEP else STEP
    PER_BYTE: tl.constexpr = 2 if KIND == "int4" or KIND == "mxfp4" else 1
    x_ptrs = x_ptr + x_rows[:, None] * x_stride + tl.arange(0, WIDTH)[None, :]  # [M, WIDTH]
    weight_ptrs = weight_ptr + expert64 * weight_stride_e + weight_rows[:, None] * weight_stride_n
    weight_ptrs += tl.arange(0, WIDTH // PER_BYTE)[None, :]  # [N, WIDTH]
    scales_ptrs, zeros_ptrs, x_scales_ptrs = None, None, None
    if scales_ptr is not None:
        scales_ptrs = scales_ptr + expert64 * scales_stride_e + weight_rows // SQUARE * scales_stride_n
    if zeros_ptr is not None:
        zeros_ptrs = zeros_ptr + expert64 * zeros_stride_e + weight_rows * zeros_stride_n
    if x_scales_ptr is not None:
        x_scales_ptrs = x_scales_ptr + x_rows * x_scales_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.float32)
    if GROUP == 0:
        zeros = _zero_points(zeros_ptrs, col_mask, 0, BLOCK_N)
        for start in range(0, k, STEP):
            acc = _add_product(
                acc,
                x_ptrs,
                weight_ptrs,
                scales_ptrs,
                zeros,
                row_mask,
                col_mask,
                start,
                k,
                KIND,
                PTX,
                GROUP,
                EVEN_K,
                SWAPPED,
                WIDTH,
            )
        if KIND != "mxfp4":
            acc = _scaled(acc, scales_ptrs, x_scales_ptrs, row_mask, col_mask, 0, KIND, SWAPPED)
    else:
        for start in range(0, k, STEP):
            for part in tl.static_range(0, STEP, WIDTH):
                first = start + part
                rows = row_mask & (first + tl.zeros_like(lanes) < k)
                columns = col_mask & (first + tl.zeros_like(outputs) < k)
                zeros = _zero_points(zeros_ptrs, columns, first // GROUP, BLOCK_N)
                product = tl.zeros_like(acc)
                product = _add_product(
                    product,
                    x_ptrs,
                    weight_ptrs,
                    scales_ptrs,
                    zeros,
                    rows,
                    columns,
                    first,
                    k,
                    KIND,
                    PTX,
                    GROUP,
                    EVEN_K,
                    SWAPPED,
                    WIDTH,
                )
                acc += _scaled(product, scales_ptrs, x_scales_ptrs, rows, columns, first // GROUP, KIND, SWAPPED)
    if SWAPPED:
        acc = tl.trans(acc)
    if GATED:
        gate, up = tl.split(acc.reshape(BLOCK_M, COLS, 2))
        acc = gate * tl.sigmoid(gate) * up
        cols = first_col + tl.arange(0, COLS)
    else:
        shares = tl.load(shares_ptr + tokens64 * shares_stride + pairs % TOP_K, mask=row_mask, other=0.0)
        acc *= shares[:, None]
    out_ptrs = out_ptr + pairs64[:, None] * out_stride + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (cols < n)[None, :])


@triton.jit
def _zero_points(zeros_ptrs, mask, group, BLOCK_N: tl.constexpr):
    """The zero point of each output in one group, fp32 [N]."""
    if zeros_ptrs is None:
        zeros = tl.full((BLOCK_N,), 8.0, tl.float32)
    else:
        zeros = tl.load(zeros_ptrs + group, mask=mask, other=0).to(tl.float32)
    return zeros


@triton.jit
def _scaled(product, scales_ptrs, x_scales_ptrs, row_mask, col_mask, group, KIND: tl.constexpr, SWAPPED: tl.constexpr):
    """``product`` times the scales of its outputs, and of its rows where x has any, in one group."""
    if scales_ptrs is not None:
        scales = tl.load(scales_ptrs + group, mask=col_mask, other=0)
        scales = _power_of_two(scales) if KIND == "mxfp4" else scales.to(tl.float32)
        product *= scales[:, None] if SWAPPED else scales[None, :]
    if x_scales_ptrs is not None:
        x_scales = tl.load(x_scales_ptrs + group, mask=row_mask, other=0.0)
        product *= x_scales[None, :] if SWAPPED else x_scales[:, None]
    return product


@triton.jit
def _add_product(
    acc,
    x_ptrs,
    weight_ptrs,
    scales_ptrs,
    zeros,
    row_mask,
    col_mask,
    start,
    k,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``acc`` and the product of WIDTH elements of k from ``start`` on, which is even."""
    x_mask = row_mask[:, None]
    if not EVEN_K:
        x_mask = x_mask & (start + tl.arange(0, WIDTH) < k)[None, :]
    x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)  # 0 past k, whatever the weight is there
    weight = _numbers(weight_ptrs, zeros, col_mask[:, None], start, k, x.dtype, KIND, PTX, EVEN_K, WIDTH)
    if KIND == "mxfp4" and GROUP == 0:
        weight = _times_powers(weight, scales_ptrs, col_mask, start, k, WIDTH)
    weight = weight.to(x.dtype)
    if SWAPPED:
        left, right = weight, tl.trans(x)
    else:
        left, right = x, tl.trans(weight)
    if KIND == "fp8":  # whose sums a Hopper card keeps in 14 bits unless it is told when to move them
        result = tl.dot(left, right, acc, max_num_imprecise_acc=WIDTH)
    else:
        result = tl.dot(left, right, acc, input_precision="ieee")
    return result


# ---- decoders: a tile of the weight as numbers that x's dtype holds exactly, [N, WIDTH]


@triton.jit
def _numbers(
    weight_ptrs,
    zeros,
    mask,
    start,
    k,
    dtype: tl.constexpr,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """WIDTH elements of k from ``start`` on, decoded as KIND says."""
    PER_BYTE: tl.constexpr = 2 if KIND == "int4" or KIND == "mxfp4" else 1
    if not EVEN_K:
        mask = mask & (start + PER_BYTE * tl.arange(0, WIDTH // PER_BYTE) < k)[None, :]
    if KIND == "dense" or KIND == "fp8":
        numbers = tl.load(weight_ptrs + start, mask=mask, other=0.0)
    else:
        codes = tl.load(weight_ptrs + start // PER_BYTE, mask=mask, other=0)
        if KIND == "e4m3":
            numbers = e4m3_numbers(codes)
        elif KIND == "int4":
            low, high = halves(codes, dtype, PTX)
            shifted = (zeros + code_offset(dtype)).to(dtype)[:, None]
            numbers = tl.join(low - shifted, high - shifted).reshape(codes.shape[0], WIDTH)
        elif KIND == "mxfp4":
            numbers = tl.join(_from_e2m1(codes & 15), _from_e2m1(codes >> 4)).reshape(codes.shape[0], WIDTH)
        else:
            numbers = codes
    return numbers


@triton.jit
def _times_powers(numbers, scales_ptrs, col_mask, start, k, WIDTH: tl.constexpr):
    """fp32 ``numbers`` [N, WIDTH] times the power of two of every 32 of them: exact, and exact in bf16."""
    parts = tl.arange(0, WIDTH // 32)
    exponents_ptrs = scales_ptrs[:, None] + (start // 32 + parts)[None, :]
    exponents = tl.load(exponents_ptrs, mask=col_mask[:, None] & (start + 32 * parts < k)[None, :], other=0)
    scaled = numbers.reshape(numbers.shape[0], WIDTH // 32, 32) * _power_of_two(exponents)[:, :, None]
    return scaled.reshape(numbers.shape[0], WIDTH)


@triton.jit
def _from_e2m1(codes):
    """Codes of e2m1 as fp32, exactly: as ``e4m3_numbers``, with biases of 1 and 127 and no NaN."""
    bits = codes.to(tl.int32)
    shifted = ((bits & 7) << 22) | ((bits & 8) << 28)
    return shifted.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _power_of_two(exponents):
    """Bytes of e8m0 as fp32: 2 ** (byte - 127), NaN for 255. That of 0 is subnormal: its bit is the first of the mantissa."""
    bits = tl.where(exponents == 0, 1 << 22, exponents.to(tl.int32) << 23)
    return tl.where(exponents == 255, float("nan"), bits.to(tl.float32, bitcast=True))
