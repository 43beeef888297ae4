"""Attention of one query per sequence over keys read through the page table. Memory-bound: K and V are read once.

One program per (sequence, KV head, split of the keys); the query heads that share a KV head ride in one tile. Where a sequence
has more than one split, a second kernel merges their results in the order of the splits. The plan lives on the device: each
program finds its keys from its sequence's length, so the host knows no length and never waits. The grid is bound by what the
page table can hold, and a program without keys leaves at once.

Two plans, one kernel. ``flash_decoding`` cuts a sequence into as many splits as fill a device, fewer in a larger batch: the
results of one sequence then differ in their last bits with the size of the batch. ``flash_decoding_fixed_splits`` cuts at
fixed lengths, so that they do not; for that it writes and merges partial results even where the batch alone fills the device.

Two kinds of pool, one kernel. Of ``flash_decoding_fp8``'s half as many bytes are read: e4m3 becomes numbers in registers, the
scale of a head's K goes into the softmax's and that of its V into the result. V comes as pairs of bytes, of which the first ones
and the second ones are a matrix each.
"""

import math

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.attention.inputs import check_attention, comes_in_pairs, in_memory, refusal
from rapid_llm.kernels.ops.primitives.codes import has_inline_ptx
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, let_next_begin, wait_for_inputs
from rapid_llm.kernels.ops.primitives.e4m3_pool import WEIGHT_BITS, beside_e4m3, pairs_of_numbers, pool_numbers
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_PROGRAMS = 512  # three or four for each multiprocessor of a large card: enough loads in flight to use its bandwidth
_LONGEST_SPLIT = 16_384  # keys of one program at most, so that one long sequence does not hold up a large batch
_FIXED_SPLIT = 256  # keys of a fixed split, grown where the table would hold more than _FIXED_SPLITS of them
_FIXED_SPLITS = 64
_MERGED_AT_ONCE = tl.constexpr(16)  # splits that the merge kernel loads together, and those of a sequence with more of them:
_MANY_MERGED_AT_ONCE = tl.constexpr(64)  # its loads are on their way at a time then


def flash_decoding(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> torch.Tensor:
    """Write the attention of one query per sequence over its seq_lens[b] keys into ``out`` and return it. Copies nothing.

    Where seq_lens[b] is 0 the row is padding: zeros are written and neither table nor pool is read. What the index tensors hold
    is not looked at on the host. Allocates fp32 partial results, about (512 + num_seqs * num_kv_heads) * group * head_dim.

    Args:
        q: [num_seqs, num_heads, head_dim <= 256], fp32 | bf16 | fp16; inner stride 1, the others free.
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], same dtype, num_kv_heads divides num_heads; inner stride 1.
        page_table: [num_table_rows, num_columns], int32; inner stride 1. Columns past a sequence's end may hold anything.
        table_rows: [num_seqs], int32; stride 1.
        seq_lens: [num_seqs], int32; stride 1. From sm90 on the three index tensors may be read before the kernel launched last
            has ended, so they are not what that one writes.
        out: like q; apart from it.
        page_size: rows of a page, a power of two up to 256.
        sm_scale: factor on q . k, above 0.
    Raises: KernelInputError on any other shape, dtype, stride, device, page size or scale; nothing is launched then.
    Twin: kernels/reference/attention.py::flash_decoding. Origin: this repo; splits along the keys as in Flash-Decoding
        (Dao et al. 2023, https://pytorch.org/blog/flash-decoding).
    """
    return _decode(q, k_pool, v_pool, page_table, table_rows, seq_lens, out, page_size, sm_scale, fixed_splits=False)


def flash_decoding_fixed_splits(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> torch.Tensor:
    """``flash_decoding`` with results of a sequence that are the same bits alone and in any batch of the same page table.

    Allocates fp32 partial results of up to num_seqs * num_heads * 64 * head_dim. Everything else as there.
    """
    return _decode(q, k_pool, v_pool, page_table, table_rows, seq_lens, out, page_size, sm_scale, fixed_splits=True)


def flash_decoding_fp8(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> torch.Tensor:
    """``flash_decoding`` over pools of e4m3, whose numbers times their head's scale are K and V.

    Args:
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], float8_e4m3fn; inner stride 1. head_dim, strides and address of
            v_pool are even.
        k_scale, v_scale: [num_kv_heads], fp32, above 0, which is not looked at; stride 1.

    Everything else as there.
    Twin: kernels/reference/attention.py::flash_decoding_fp8.
    """
    scales = (k_scale, v_scale)
    return _decode(q, k_pool, v_pool, page_table, table_rows, seq_lens, out, page_size, sm_scale, scales, fixed_splits=False)


def _decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    fixed_splits: bool,
) -> torch.Tensor:
    op = "flash_decoding" if scales is None else "flash_decoding_fp8"
    check_attention(
        op, q, k_pool, v_pool, page_table, table_rows, seq_lens, scales, out=out, page_size=page_size, sm_scale=sm_scale
    )
    (num_seqs, num_heads, head_dim), num_kv_heads = q.shape, k_pool.shape[1]
    if num_seqs != table_rows.shape[0]:
        raise refusal(op, q=q, table_rows=table_rows, seq_lens=seq_lens)
    if scales is not None:
        if not comes_in_pairs(v_pool):
            raise refusal(op, q=q, v_pool=v_pool)
        v_pool = v_pool.view(torch.int16)
    if not num_seqs or not num_heads:
        return out
    device = launch_device(q)
    # No size of the batch: whatever it is, a sequence is computed by the same compiled kernel.
    tile = resolve_tiles(
        op, device=device, dtype=q.dtype,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size,
    ).launch()  # fmt: skip
    group = num_heads // num_kv_heads
    group_tiles = _ceil_div(group, tile["BLOCK_M"])
    programs = num_seqs * num_kv_heads * group_tiles
    wanted, shortest, longest = _plan(programs, page_table.shape[1] * page_size, tile["BLOCK_N"], fixed_splits)
    num_splits = _most_splits(page_table.shape[1] * page_size, wanted, shortest, longest)

    rows = num_seqs * num_heads * num_splits if num_splits > 1 else 0
    partial_out = torch.empty((rows, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((rows,), dtype=torch.float32, device=q.device)
    padded_dim = max(triton.next_power_of_2(head_dim), 16 if scales is None else 32)
    plan = {"MIN_KEYS": shortest, "MAX_KEYS": longest}
    k_scale, v_scale = scales or (None, None)
    _flash_decoding_kernel[(programs, num_splits)](
        q, in_memory(k_pool, device), v_pool, k_scale, v_scale, out, partial_out, partial_lse,
        page_table, table_rows, seq_lens,
        q.stride(0), q.stride(1), k_pool.stride(0), k_pool.stride(1), v_pool.stride(0), v_pool.stride(1),
        out.stride(0), out.stride(1), page_table.stride(0),
        wanted, sm_scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_TILES=group_tiles, HEAD_DIM=head_dim, PADDED_DIM=padded_dim,
        PAGE_SIZE=page_size, PTX=has_inline_ptx() and device.native_fp8, **plan, **tile, **dependent_launch(device),
    )  # fmt: skip
    if num_splits > 1:
        _merge_splits_kernel[(num_seqs * num_heads,)](
            partial_out, partial_lse, out, seq_lens, out.stride(0), out.stride(1), wanted, num_splits,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, **plan, BLOCK_N=tile["BLOCK_N"],
            num_warps=4, num_stages=1, **dependent_launch(device),
        )  # fmt: skip
    return out


def _plan(programs: int, capacity: int, block_n: int, fixed_splits: bool) -> tuple[int, int, int]:
    """How sequences are cut: (splits wanted, shortest split, longest split), the last two in keys and whole tiles.

    Args:
        programs: (sequence, KV head, tile of its group)s.
        capacity: keys that a row of the page table can hold.
        block_n: keys of a tile.
        fixed_splits: whether every split has one length.
    """
    if fixed_splits:
        keys = max(_FIXED_SPLIT, block_n, triton.next_power_of_2(_ceil_div(capacity, _FIXED_SPLITS)))
        return 1, keys, keys
    return _ceil_div(_PROGRAMS, programs), block_n, _LONGEST_SPLIT


def _most_splits(capacity: int, wanted: int, shortest: int, longest: int) -> int:
    """Splits of the longest sequence that a row of the page table can hold, or a little more."""
    return max(1, min(max(wanted, _ceil_div(capacity, longest)), _ceil_div(capacity, shortest)))


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


@triton.jit(do_not_specialize=["wanted"])
def _flash_decoding_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    page_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    wanted,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PTX: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MAX_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    pair, split = tl.program_id(0), tl.program_id(1)
    sequence = (pair // (NUM_KV_HEADS * GROUP_TILES)).to(tl.int64)  # sequence * stride can pass 2**31
    kv_head = pair // GROUP_TILES % NUM_KV_HEADS
    k_ptr += kv_head.to(tl.int64) * k_head_stride  # a head-major view's heads lie a whole pool apart
    v_ptr += kv_head.to(tl.int64) * v_head_stride
    # The index tensors may be read before the wait by contract, and what they lead to takes two reads to find.
    num_keys = tl.load(seq_lens_ptr + sequence)
    table_row = tl.load(table_rows_ptr + sequence)  # here, so that both are on their way together
    split_keys = _split_keys(num_keys, wanted, MIN_KEYS, MAX_KEYS, BLOCK_N)
    begin = split * split_keys
    table_ptr = page_table_ptr + table_row.to(tl.int64) * table_stride
    end = tl.minimum(begin + split_keys, num_keys)
    keys = begin + tl.arange(0, BLOCK_N)
    pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=keys < end, other=0)
    wait_for_inputs(PDL, False)
    if (begin >= num_keys) & (split > 0):  # the first split of padding stays, to write its zeros
        return

    in_group = pair % GROUP_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + in_group
    dims = tl.arange(0, PADDED_DIM)
    inside = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]  # [M, D]
    q_ptrs = q_ptr + sequence * q_stride + heads[:, None].to(tl.int64) * q_head_stride + dims[None, :]
    q = tl.load(q_ptrs, mask=inside, other=0.0)
    row_scale, score_scale = scale_log2, scale_log2
    HEADROOM: tl.constexpr = 0.0 if k_scale_ptr is None else WEIGHT_BITS
    if k_scale_ptr is not None:
        q, divisors = beside_e4m3(q)
        row_scale = scale_log2 * tl.load(k_scale_ptr + kv_head) * divisors  # [M]
        score_scale = row_scale[:, None]

    V_DIM: tl.constexpr = PADDED_DIM if k_scale_ptr is None else PADDED_DIM // 2
    V_STEP: tl.constexpr = PADDED_DIM // V_DIM
    v_dims = tl.arange(0, V_DIM)
    acc = tl.zeros((BLOCK_M, V_DIM), tl.float32)
    if k_scale_ptr is not None:
        acc_second = tl.zeros((BLOCK_M, V_DIM), tl.float32)
    # Every tile of a split has a key, so a maximum is finite from the first tile on.
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for _ in range(begin, end, BLOCK_N):
        # int64 first: rows * stride can pass 2**31. No %: from it Triton 3.6 infers that all rows are multiples of the page size.
        rows = pages.to(tl.int64) * PAGE_SIZE + (keys & (PAGE_SIZE - 1))
        present = keys < end
        keys += BLOCK_N
        pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=keys < end, other=0)  # one tile ahead of its keys
        # A row that no key lies in may hold NaN, and 0 * NaN is NaN: masked rows are read as 0.
        loaded = present[:, None] & (dims < HEAD_DIM)[None, :]  # [N, D]
        v_loaded = present[:, None] & (v_dims < HEAD_DIM // V_STEP)[None, :]
        k = tl.load(k_ptr + rows[:, None] * k_stride + dims[None, :], mask=loaded, other=0.0)
        v = tl.load(v_ptr + rows[:, None] * v_stride + v_dims[None, :], mask=v_loaded, other=0.0)
        if k_scale_ptr is not None:
            k = pool_numbers(k, q.dtype)
            v, v_second = pairs_of_numbers(v, q.dtype, PTX)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
        scores = tl.where(present[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * row_scale)
        weights = tl.exp2(scores * score_scale - (new_max - HEADROOM)[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        if k_scale_ptr is not None:
            acc_second = tl.dot(weights.to(v.dtype), v_second, acc_second * rescale[:, None], input_precision="ieee")
        row_max = new_max

    divisor = tl.where(num_keys == 0, 1.0, row_sum)[:, None]
    result = acc / divisor
    if v_scale_ptr is not None:
        result = tl.interleave(result, acc_second / divisor) * tl.load(v_scale_ptr + kv_head)
    if split_keys >= num_keys:  # the only split
        out_ptrs = out_ptr + sequence * out_stride + heads[:, None].to(tl.int64) * out_head_stride + dims[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        partials = (sequence * (NUM_KV_HEADS * GROUP) + heads) * tl.num_programs(1) + split  # [M]
        tl.store(partial_out_ptr + partials[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
        tl.store(partial_lse_ptr + partials, row_max + tl.log2(row_sum), mask=in_group < GROUP)


@triton.jit(do_not_specialize=["wanted", "num_splits"])
def _merge_splits_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    seq_lens_ptr,
    out_stride,
    out_head_stride,
    wanted,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MAX_KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    pair = tl.program_id(0).to(tl.int64)
    num_keys = tl.load(seq_lens_ptr + pair // NUM_HEADS)
    wait_for_inputs(PDL, False)
    split_keys = _split_keys(num_keys, wanted, MIN_KEYS, MAX_KEYS, BLOCK_N)
    if split_keys >= num_keys:  # its only split has written the result
        return
    dims = tl.arange(0, PADDED_DIM)
    first, count = pair * num_splits, tl.cdiv(num_keys, split_keys)
    if count <= _MERGED_AT_ONCE:
        result = _merged(partial_out_ptr, partial_lse_ptr, first, count, dims, HEAD_DIM, PADDED_DIM, _MERGED_AT_ONCE)
    else:
        result = _merged(partial_out_ptr, partial_lse_ptr, first, count, dims, HEAD_DIM, PADDED_DIM, _MANY_MERGED_AT_ONCE)
    out_ptrs = out_ptr + pair // NUM_HEADS * out_stride + pair % NUM_HEADS * out_head_stride + dims
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _merged(
    partial_out_ptr,
    partial_lse_ptr,
    first,
    count,
    dims,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The result [D] of ``count`` splits, the first of which wrote at ``first``."""
    acc = tl.zeros((PADDED_DIM,), tl.float32)
    largest = float("-inf")
    total = 0.0
    for start in range(0, count, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        written = splits < count
        partials = first + splits
        lse = tl.load(partial_lse_ptr + partials, mask=written, other=float("-inf"))  # [S]
        loaded = written[:, None] & (dims < HEAD_DIM)[None, :]
        results = tl.load(partial_out_ptr + partials[:, None] * HEAD_DIM + dims[None, :], mask=loaded, other=0.0)  # [S, D]
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        rescale = tl.exp2(largest - new_largest)
        weights = tl.exp2(lse - new_largest)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(results * weights[:, None], 0)
        largest = new_largest
    return acc / total


@triton.jit
def _split_keys(num_keys, wanted, MIN_KEYS: tl.constexpr, MAX_KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of each split of a sequence but its last, in whole tiles."""
    keys = tl.minimum(tl.maximum(tl.cdiv(num_keys, wanted), MIN_KEYS), MAX_KEYS)
    return tl.cdiv(keys, BLOCK_N) * BLOCK_N
