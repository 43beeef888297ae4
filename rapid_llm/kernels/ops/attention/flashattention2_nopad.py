"""Causal attention of packed ragged prompts over keys read through the page table. Compute-bound.

One program per (query tile, head). Fresh, resumed and shared prompts are one code path: the keys of a sequence are its table
row's pages, its queries are the last of its positions. Keys that every query of the tile sees are walked without a mask; only the
diagonal and the last keys are masked. Scores, maxima and sums stay in fp32.

Tiles, splits of their keys and the merge of these: ``prefill_plan.py``.

Two kinds of pool, one kernel: e4m3 of ``flashattention2_nopad_fp8`` becomes numbers in registers, the scale of a head's K goes
into the softmax's and that of its V into the result.
"""

import math

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.attention.inputs import check_prefill, in_memory
from rapid_llm.kernels.ops.attention.prefill_plan import (
    bounds_of,
    keys_of_a_split,
    merge_splits,
    padded,
    plan_prefill,
    sequence_at,
)
from rapid_llm.kernels.ops.primitives.e4m3_pool import WEIGHT_BITS, beside_e4m3, pool_numbers
from rapid_llm.kernels.ops.tile_policy import resolve_tiles


def flashattention2_nopad(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
    max_seqlen_q: int,
) -> torch.Tensor:
    """Write causal attention of packed ragged prompts, or chunks of them, into ``out`` and return it. Copies nothing.

    Rows cu_seqlens_q[b]:cu_seqlens_q[b + 1] of q are the last tokens of sequence b's seq_lens[b] keys; those before are its
    cached prefix. The key at position p lies in pool row page_table[table_rows[b], p // page_size] * page_size + p % page_size.
    What the index tensors hold is not looked at on the host.

    Args:
        q: [num_tokens, num_heads, head_dim <= 256], fp32 | bf16 | fp16; inner stride 1, the others free.
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], same dtype, num_kv_heads divides num_heads; inner stride 1.
        page_table: [num_table_rows, num_columns], int32; inner stride 1. Columns past a sequence's end may hold anything.
        table_rows: [num_seqs], int32; stride 1.
        cu_seqlens_q: [num_seqs + 1], int32, never falling; rows of q before its first entry and past its last are nobody's.
        seq_lens: [num_seqs], int32, keys of each sequence, its query tokens included; stride 1.
        out: like q; apart from it. Nobody's rows keep what they hold.
        page_size: rows of a page, a power of two up to 256.
        sm_scale: factor on q . k, above 0.
        max_seqlen_q: at least the longest run of query tokens; rows of a longer one are left as they are.
    Raises: KernelInputError on any other shape, dtype, stride, device, page size or scale; nothing is launched then.
    Twin: kernels/reference/attention.py::flashattention2_nopad. Origin: this repo; the algorithm is FlashAttention-2
        (Dao 2023, arXiv:2307.08691).
    """
    sequences = (page_table, table_rows, cu_seqlens_q, seq_lens)
    return _prefill(q, k_pool, v_pool, *sequences, None, out, page_size, sm_scale, max_seqlen_q)


def flashattention2_nopad_fp8(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
    max_seqlen_q: int,
) -> torch.Tensor:
    """``flashattention2_nopad`` over pools of e4m3, whose numbers times their head's scale are K and V.

    Args:
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], float8_e4m3fn; inner stride 1.
        k_scale, v_scale: [num_kv_heads], fp32, above 0, which is not looked at; stride 1.

    Everything else as there.
    Twin: kernels/reference/attention.py::flashattention2_nopad_fp8.
    """
    sequences = (page_table, table_rows, cu_seqlens_q, seq_lens)
    return _prefill(q, k_pool, v_pool, *sequences, (k_scale, v_scale), out, page_size, sm_scale, max_seqlen_q)


def _prefill(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
    max_seqlen_q: int,
) -> torch.Tensor:
    op = "flashattention2_nopad" if scales is None else "flashattention2_nopad_fp8"
    check_prefill(
        op, q, k_pool, v_pool, page_table, table_rows, cu_seqlens_q, seq_lens, scales,
        out=out, page_size=page_size, sm_scale=sm_scale, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip
    num_seqs, num_heads, num_kv_heads, head_dim = table_rows.shape[0], q.shape[1], k_pool.shape[1], q.shape[2]
    if not num_seqs or not num_heads or not q.shape[0] or not max_seqlen_q:
        return out
    device = launch_device(q)
    tile = resolve_tiles(
        op, device=device, dtype=q.dtype,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, q_len=max_seqlen_q,
    ).launch()  # fmt: skip
    plan = plan_prefill(q, page_table, num_seqs, page_size, max_seqlen_q, tile["BLOCK_M"], tile["BLOCK_N"])
    k_scale, v_scale = scales or (None, None)
    _flashattention2_nopad_kernel[(plan.num_items,)](
        q, in_memory(k_pool, device), in_memory(v_pool, device), k_scale, v_scale, out, plan.partial_out, plan.partial_lse,
        page_table, table_rows, cu_seqlens_q, seq_lens,
        q.stride(0), q.stride(1), k_pool.stride(0), k_pool.stride(1), v_pool.stride(0), v_pool.stride(1),
        out.stride(0), out.stride(1), page_table.stride(0),
        num_seqs, plan.wanted, sm_scale * math.log2(math.e),
        NUM_HEADS=num_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim), PAGE_SIZE=page_size, **{**plan.constants, **tile},
    )  # fmt: skip
    merge_splits(plan, out, cu_seqlens_q, seq_lens)
    return out


@triton.jit(do_not_specialize=["num_seqs", "wanted"])
def _flashattention2_nopad_kernel(
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
    cu_seqlens_ptr,
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
    num_seqs,
    wanted,
    scale_log2,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    place, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    lanes = tl.arange(0, SEQS)
    split_keys = keys_of_a_split(lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, wanted, SEQS, SHORTEST, BLOCK_M, BLOCK_N)
    sequence, tile = sequence_at(place, lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, split_keys, SEQS, BLOCK_M)
    if sequence >= num_seqs:
        return
    first_token, num_queries, first_query, first_position, seen, split = bounds_of(
        sequence, tile, cu_seqlens_ptr, seq_lens_ptr, split_keys, BLOCK_M
    )
    begin = split * split_keys
    if begin >= seen:
        return
    is_split = split_keys < seen
    # Of this split; before that, in whole tiles, the keys that every query sees.
    seen = tl.minimum(seen, begin + split_keys)
    whole = tl.minimum(tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, begin), begin + split_keys)

    queries = first_query + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    tokens = (first_token + queries).to(tl.int64)
    inside = (queries < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]  # [M, D]
    q = tl.load(q_ptr + tokens[:, None] * q_stride + head.to(tl.int64) * q_head_stride + dims[None, :], mask=inside, other=0.0)

    table_ptr = page_table_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * table_stride
    kv_head = (head // GROUP).to(tl.int64)  # a head-major view has its heads a whole pool apart
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    row_scale, score_scale = scale_log2, scale_log2
    HEADROOM: tl.constexpr = 0.0 if k_scale_ptr is None else WEIGHT_BITS
    if k_scale_ptr is not None:
        q, divisors = beside_e4m3(q)
        row_scale = scale_log2 * tl.load(k_scale_ptr + kv_head) * divisors  # [M]
        score_scale = row_scale[:, None]
    positions = first_position + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, PADDED_DIM), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, positions, k_stride, v_stride, begin, whole,
        row_scale, score_scale, HEADROOM, HEAD_DIM, PADDED_DIM, PAGE_SIZE, BLOCK_N, False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, positions, k_stride, v_stride, whole, seen,
        row_scale, score_scale, HEADROOM, HEAD_DIM, PADDED_DIM, PAGE_SIZE, BLOCK_N, True,
    )  # fmt: skip

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # the query sees none of the split's keys
    result = acc / row_sum[:, None]
    if v_scale_ptr is not None:
        result *= tl.load(v_scale_ptr + kv_head)
    if is_split:
        partials = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial_out_ptr + partials[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
        tl.store(partial_lse_ptr + partials, row_max + tl.log2(row_sum), mask=queries < num_queries)
    else:
        out_ptrs = out_ptr + tokens[:, None] * out_stride + head.to(tl.int64) * out_head_stride + dims[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    positions,
    k_stride,
    v_stride,
    begin,
    end,
    row_scale,
    score_scale,
    HEADROOM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax of q [M, D] over the keys begin .. end; unless MASKED they are whole tiles that every query sees.

    Scores are scaled by a scalar or by row, as [M] and [M, 1]; weights are taken times 2**HEADROOM.
    """
    dims = tl.arange(0, PADDED_DIM)
    keys = begin + tl.arange(0, BLOCK_N)
    pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=keys < end, other=0)
    for _ in range(begin, end, BLOCK_N):
        # int64 first: rows * stride can pass 2**31. No %: from it Triton 3.6 infers that all rows are multiples of the page size.
        rows = pages.to(tl.int64) * PAGE_SIZE + (keys & (PAGE_SIZE - 1))
        ahead = keys + BLOCK_N
        pages = tl.load(table_ptr + ahead // PAGE_SIZE, mask=ahead < end, other=0)  # one tile ahead of its keys
        k_ptrs = k_ptr + rows[:, None] * k_stride + dims[None, :]  # [N, D]
        v_ptrs = v_ptr + rows[:, None] * v_stride + dims[None, :]
        # A row that no key lies in may hold NaN, and 0 * NaN is NaN: masked rows are read as 0.
        if MASKED:
            present = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_ptrs, mask=present, other=0.0)
            v = tl.load(v_ptrs, mask=present, other=0.0)
        elif HEAD_DIM < PADDED_DIM:
            k = tl.load(k_ptrs, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_ptrs, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        if k.dtype != q.dtype:
            k, v = pool_numbers(k, q.dtype), pool_numbers(v, q.dtype)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
        if MASKED:
            scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * row_scale)
        if MASKED:  # a query may have seen no key of the split yet; any finite number does then
            new_max = tl.maximum(new_max, -3e38)
        weights = tl.exp2(scores * score_scale - (new_max - HEADROOM)[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
        keys = ahead
    return acc, row_max, row_sum
