"""Prefill attention for Hopper in Gluon: one persistent program a multiprocessor whose warps divide the work. Compute-bound.

A warp produces: it works out which tile of queries comes next, as ``prefill_plan.py`` says, and has the memory engine (TMA) copy
its queries and, page by page, its keys and values into shared memory. Two groups of four warps consume, 64 queries each: the
product of the next keys is under way while the weights of the last ones are worked out and multiplied by their values, as in
FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608). Since the producer runs ahead into the next item, nothing of an item is
waited for but its products. Items are walked from heavy to light, to and fro over the programs, so that all end about together.

Everybody waits on barriers in shared memory only: a stage is full once its bytes have landed, and empty once both groups have
read it; queries, and the few numbers that say what to do with them, are a stage of their own. Keys are walked from the last to
the first, so that the masked tiles come first.

Triton's Gluon has no interpreter, and changes from version to version: the row is of Triton 3.6 and of sm90 alone. Where a tensor
is laid out as TMA cannot read it, or is of another dtype or size, or the device is another, the Triton row's function serves.
"""

import math
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.attention import flashattention2_nopad as triton_row
from rapid_llm.kernels.ops.attention.inputs import check_prefill
from rapid_llm.kernels.ops.attention.prefill_plan import bounds_of, keys_of_a_split, merge_splits, plan_prefill, sequence_at

_BLOCK_M = 128  # queries of a tile, half of them a group's
_BLOCK_N = 128
_HEAD_DIM = 128
_HALF = 64  # elements in the 128 bytes of a row that TMA swizzles
_STAGES = 2  # of keys and of values
_REGISTERS = (224, 56)  # of a thread of the second consumer and of the producer; the first consumer keeps the rest of 504
_PAGES = (8, 128)  # rows of a page: a swizzled box, a tile of keys
_MULTIPROCESSORS = 132  # of an H200, for which a CPU compiles
_FIELDS = gl.constexpr(8)


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

    Arguments, results and refusals are those of ``flashattention2_nopad.py::flashattention2_nopad``, which serves the call where
    this kernel cannot: it takes bf16 and fp16, head_dim 128, pages of 8 to 128 rows, and q and pools whose heads lie side by side
    in rows that begin at multiples of 16 bytes, on sm90.

    Raises: KernelInputError as there; nothing is launched then.
    Twin: kernels/reference/attention.py::flashattention2_nopad. Origin: this repo; the division of work is that of
        FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
    """
    sequences = (page_table, table_rows, cu_seqlens_q, seq_lens)
    check_prefill(
        "flashattention2_nopad", q, k_pool, v_pool, *sequences,
        out=out, page_size=page_size, sm_scale=sm_scale, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip
    num_seqs, num_heads = table_rows.shape[0], q.shape[1]
    if not num_seqs or not num_heads or not q.shape[0] or not max_seqlen_q:
        return out
    if not _is_served(q, k_pool, v_pool, page_size):
        return triton_row.flashattention2_nopad(
            q, k_pool, v_pool, *sequences, out=out, page_size=page_size, sm_scale=sm_scale, max_seqlen_q=max_seqlen_q
        )
    plan = plan_prefill(q, page_table, num_seqs, page_size, max_seqlen_q, _BLOCK_M, _BLOCK_N)
    _flashattention2_nopad_kernel[(min(plan.num_items, _multiprocessors(q.device)),)](
        _rows(q, _BLOCK_M // 2), _rows(k_pool, page_size), _rows(v_pool, page_size), v_pool,
        out, plan.partial_out, plan.partial_lse, *sequences,
        v_pool.stride(0), out.stride(0), out.stride(1), page_table.stride(0),
        num_seqs, k_pool.shape[0], plan.wanted, plan.num_items, sm_scale * math.log2(math.e),
        NUM_HEADS=num_heads, GROUP=num_heads // k_pool.shape[1], HALF=_HALF, PAGE_SIZE=page_size,
        STAGES=_STAGES, CONSUMER=_REGISTERS[0], PRODUCER=_REGISTERS[1], **plan.constants, num_warps=4,
    )  # fmt: skip
    merge_splits(plan, out, cu_seqlens_q, seq_lens)
    return out


def _is_served(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, page_size: int) -> bool:
    """Whether this kernel takes tensors that fit one another."""
    return (
        launch_device(q).sm == 90
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] == _HEAD_DIM
        and _PAGES[0] <= page_size <= _PAGES[1]
        and k_pool.shape[0] > 0
        and all(_is_of_rows(tensor) for tensor in (q, k_pool, v_pool))
    )


def _is_of_rows(tensor: torch.Tensor) -> bool:
    """Whether TMA can read [rows, heads, head_dim] as a matrix."""
    dense = tensor.shape[1] == 1 or tensor.stride(1) == tensor.shape[2]
    return dense and tensor.stride(0) * tensor.element_size() % 16 == 0 < tensor.stride(0) and tensor.data_ptr() % 16 == 0


def _rows(tensor: torch.Tensor, count: int) -> TensorDescriptor:
    """[rows, heads, head_dim] as a matrix of which TMA copies ``count`` rows of half a head at a time."""
    shape = [tensor.shape[0], tensor.shape[1] * tensor.shape[2]]
    return TensorDescriptor(tensor, shape, [tensor.stride(0), 1], [count, _HALF], _box(count, tensor.dtype))


@cache
def _box(count: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([count, _HALF], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _MULTIPROCESSORS


@gluon.jit(do_not_specialize=["num_seqs", "num_rows", "wanted", "num_items"])
def _flashattention2_nopad_kernel(
    q_desc,
    k_desc,
    v_desc,
    v_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    page_table_ptr,
    table_rows_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    v_stride,
    out_stride,
    out_head_stride,
    table_stride,
    num_seqs,
    num_rows,
    wanted,
    num_items,
    scale_log2,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HALF: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
    SEQS: gl.constexpr,
    SHORTEST: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    DTYPE: gl.constexpr = q_desc.dtype
    ROWS: gl.constexpr = BLOCK_M // 2
    WIDE_Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 2 * HALF], DTYPE)
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 2 * HALF], DTYPE)
    q_s = gl.allocate_shared_memory(DTYPE, [2, ROWS, 2 * HALF], WIDE_Q)
    k_s = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, 2 * HALF], WIDE)
    v_s = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, 2 * HALF], WIDE)
    item_s = gl.allocate_shared_memory(gl.int32, [_FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    memory = (q_s, k_s, v_s, item_s, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    results = (out_ptr, partial_out_ptr, partial_lse_ptr, out_stride, out_head_stride)
    sources = (q_desc, k_desc, v_desc, v_ptr, page_table_ptr, table_rows_ptr, cu_seqlens_ptr, seq_lens_ptr)
    sizes = (v_stride, table_stride, num_seqs, num_rows, wanted, num_items)
    gl.warp_specialize(
        [
            (_consume, (memory, results, scale_log2, gl.constexpr(0), HALF, STAGES, BLOCK_M, BLOCK_N)),
            (_consume, (memory, results, scale_log2, gl.constexpr(1), HALF, STAGES, BLOCK_M, BLOCK_N)),
            (_produce, (memory, sources, sizes, NUM_HEADS, GROUP, HALF, PAGE_SIZE, STAGES, SEQS, SHORTEST, BLOCK_M, BLOCK_N)),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )


@gluon.jit
def _produce(
    memory,
    sources,
    sizes,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HALF: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    SEQS: gl.constexpr,
    SHORTEST: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """One warp: hand over this program's items and, after the last, one of no keys."""
    q_s, k_s, v_s, item_s, q_full, q_empty, k_full, k_empty, v_full, v_empty = memory
    q_desc, k_desc, v_desc, v_ptr, page_table_ptr, table_rows_ptr, cu_seqlens_ptr, seq_lens_ptr = sources
    v_stride, table_stride, num_seqs, num_rows, wanted, num_items = sizes
    # A lane holds neighbours: sums and scans stay within the warp.
    lanes = gl.arange(0, SEQS, layout=gl.BlockedLayout([SEQS // 32], [32], [1], [0]))
    ROWS: gl.constexpr = BLOCK_M // 2
    ITEM_BYTES: gl.constexpr = BLOCK_M * 2 * HALF * q_desc.dtype.primitive_bitwidth // 8
    q_boxes = q_s._reinterpret(q_desc.dtype, [4, ROWS, HALF], q_desc.layout)  # part, half
    split_keys = keys_of_a_split(lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, wanted, SEQS, SHORTEST, BLOCK_M, BLOCK_N)
    item = gl.program_id(0)
    walked = 0
    handed = 0
    produced = 0
    while item < num_items:
        place, head = item // NUM_HEADS, item % NUM_HEADS
        sequence, tile = sequence_at(place, lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, split_keys, SEQS, BLOCK_M)
        sequence, tile = _uniform(sequence), _uniform(tile)
        if sequence < num_seqs:
            begin_of, num_queries, first_query, first_position, seen, split = bounds_of(
                sequence, tile, cu_seqlens_ptr, seq_lens_ptr, split_keys, BLOCK_M
            )
            begin = _uniform(split * split_keys)
            num_tiles = _uniform(gl.cdiv(gl.maximum(gl.minimum(seen, begin + split_keys) - begin, 0), BLOCK_N))
            if num_tiles > 0:
                first_token = _uniform(begin_of + first_query)
                num_keys = _uniform(first_position - first_query + num_queries)
                partial = gl.where(split_keys < seen, item, -1)
                mbarrier.wait(q_empty, (handed & 1) ^ 1)
                _hand_over(item_s, num_tiles, begin, first_position, first_token, num_queries - first_query, head, partial)
                mbarrier.expect(q_full, ITEM_BYTES)
                for box in gl.static_range(4):
                    corner = [first_token + box // 2 * ROWS, head * 2 * HALF + box % 2 * HALF]
                    tma.async_copy_global_to_shared(q_desc, corner, q_full, q_boxes.index(box))
                table_ptr = page_table_ptr + gl.load(table_rows_ptr + sequence).to(gl.int64) * table_stride
                _produce_keys(
                    k_s, v_s, k_full, k_empty, v_full, v_empty, k_desc, v_desc, v_ptr, table_ptr, v_stride,
                    begin, num_tiles, num_keys, (head // GROUP) * 2 * HALF, num_rows, produced,
                    HALF, PAGE_SIZE, STAGES, BLOCK_N,
                )  # fmt: skip
                handed += 1
                produced += num_tiles
            walked += 1
            from_start = gl.where(walked % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))
            item = walked * gl.num_programs(0) + from_start
        else:
            item = num_items  # and so are all later ones past the last
    mbarrier.wait(q_empty, (handed & 1) ^ 1)
    _hand_over(item_s, 0, 0, 0, 0, 0, 0, 0)
    mbarrier.arrive(q_full, count=1)


@gluon.jit
def _uniform(value):
    """An int32 that all lanes have, told to the compiler: what hangs on it, addresses and branches, is worked out once a warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [value], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _hand_over(item_s, num_tiles, begin, first_position, first_token, num_left, head, partial):
    field = gl.arange(0, _FIELDS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    values = gl.where(field == 0, num_tiles, begin)
    values = gl.where(field == 2, first_position, values)
    values = gl.where(field == 3, first_token, values)
    values = gl.where(field == 4, num_left, values)
    values = gl.where(field == 5, head, values)
    values = gl.where(field == 6, partial, values)
    item_s.store(values)
    gl.thread_barrier()  # one thread tells of what all have written


@gluon.jit
def _field(fields, NUMBER: gl.constexpr):
    """A thread has all fields."""
    each = gl.arange(0, _FIELDS, layout=fields.type.layout)
    return gl.sum(gl.where(each == NUMBER, fields, 0), 0)


@gluon.jit
def _produce_keys(
    k_s,
    v_s,
    k_full,
    k_empty,
    v_full,
    v_empty,
    k_desc,
    v_desc,
    v_ptr,
    table_ptr,
    v_stride,
    begin,
    num_tiles,
    num_keys,
    column,
    num_rows,
    produced,
    HALF: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Keys and values of an item, the last tile first. Rows of pages past the sequence's end are zeros."""
    PAGES: gl.constexpr = BLOCK_N // PAGE_SIZE
    TILE_BYTES: gl.constexpr = BLOCK_N * 2 * HALF * k_desc.dtype.primitive_bitwidth // 8
    k_boxes = k_s._reinterpret(k_desc.dtype, [STAGES * 2 * PAGES, PAGE_SIZE, HALF], k_desc.layout)  # stage, half, page
    v_boxes = v_s._reinterpret(v_desc.dtype, [STAGES * 2 * PAGES, PAGE_SIZE, HALF], v_desc.layout)
    last_page = (num_keys - 1) // PAGE_SIZE
    for i in range(num_tiles):
        stage = (produced + i) % STAGES
        phase = ((produced + i) // STAGES) & 1
        first_page = (begin + (num_tiles - 1 - i) * BLOCK_N) // PAGE_SIZE
        # By every lane alike: one lane each and a sum over the warp takes longer than the tile's products.
        rows = ()
        for page in gl.static_range(PAGES):
            present = first_page + page <= last_page
            number = gl.load(table_ptr + first_page + page, mask=present, other=0)
            row = _uniform(gl.where(present, number * PAGE_SIZE, num_rows))  # past the pool TMA reads zeros
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005 - a kernel cannot unpack

        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), TILE_BYTES)
        for page in gl.static_range(PAGES):
            for half in gl.static_range(2):
                box = k_boxes.index((stage * 2 + half) * PAGES + page)
                tma.async_copy_global_to_shared(k_desc, [rows[page], column + half * HALF], k_full.index(stage), box)

        # The page that the sequence ends in may hold anything behind its end, and 0 * NaN is NaN: it is stored row by row.
        ragged = (num_keys % PAGE_SIZE > 0) & (last_page >= first_page) & (last_page < first_page + PAGES)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        for page in gl.static_range(PAGES):
            whole = (ragged & (first_page + page == last_page)) == 0
            for half in gl.static_range(2):
                box = v_boxes.index((stage * 2 + half) * PAGES + page)
                tma.async_copy_global_to_shared(v_desc, [rows[page], column + half * HALF], v_full.index(stage), box, pred=whole)
        if ragged:
            in_tile = last_page - first_page
            row = gl.load(table_ptr + last_page) * PAGE_SIZE
            _store_rows(
                v_s, v_ptr + row.to(gl.int64) * v_stride + column, v_stride, num_keys % PAGE_SIZE,
                stage * 2 * BLOCK_N + in_tile * PAGE_SIZE, HALF, PAGE_SIZE, STAGES, BLOCK_N,
            )  # fmt: skip
            mbarrier.expect(v_full.index(stage), TILE_BYTES - TILE_BYTES // PAGES)
        else:
            mbarrier.expect(v_full.index(stage), TILE_BYTES)


@gluon.jit
def _store_rows(
    v_s,
    v_ptr,
    v_stride,
    num_present,
    first,
    HALF: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """A page, zeros from ``num_present`` on, at row ``first`` of all stages' halves; eight rows at a time, as swizzles repeat."""
    EIGHT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, HALF], v_s.dtype)
    eights = v_s._reinterpret(v_s.dtype, [STAGES * 2 * BLOCK_N // 8, 8, HALF], EIGHT)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    for start in range(0, PAGE_SIZE, 8):
        inside = (start + rows < num_present)[:, None]
        ptrs = v_ptr + (start + rows).to(gl.int64)[:, None] * v_stride + columns[None, :]
        left = gl.load(ptrs, mask=inside, other=0.0)
        right = gl.load(ptrs + HALF, mask=inside, other=0.0)
        eights.index((first + start) // 8).store(left)
        eights.index((first + start + BLOCK_N) // 8).store(right)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _consume(
    memory,
    results,
    scale_log2,
    PART: gl.constexpr,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Four warps: half of the queries of every item that is handed over."""
    q_s, k_s, v_s, item_s, q_full, q_empty, k_full, k_empty, v_full, v_empty = memory
    out_ptr, partial_out_ptr, partial_lse_ptr, out_stride, out_head_stride = results
    D: gl.constexpr = 2 * HALF
    ROWS: gl.constexpr = BLOCK_M // 2
    DTYPE: gl.constexpr = q_s.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    RESULT_ROWS: gl.constexpr = gl.SliceLayout(1, RESULT)
    # Of a row's four threads each stores 16 bytes at a time, after an exchange among them through 4 KB of shared memory.
    STORED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
    EVERY_FIELD: gl.constexpr = gl.BlockedLayout([_FIELDS], [32], [4], [0])
    q = q_s.index(PART)
    in_scores = PART * ROWS + gl.arange(0, ROWS, layout=SCORE_ROWS)
    in_result = PART * ROWS + gl.arange(0, ROWS, layout=RESULT_ROWS)
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, RESULT))
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    done = 0  # items
    before = 0  # tiles of keys of these
    mbarrier.wait(q_full, 0)
    fields = item_s.load(EVERY_FIELD)
    num_tiles = _field(fields, 0)
    while num_tiles > 0:
        begin = _field(fields, 1)
        first_position = _field(fields, 2)
        first_token = _field(fields, 3)
        num_left = _field(fields, 4)
        head = _field(fields, 5)
        partial = _field(fields, 6)
        positions = first_position + in_scores

        stage = before % STAGES
        mbarrier.wait(k_full.index(stage), (before // STAGES) & 1)
        product = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(k_empty.index(stage), count=1)
        first = begin + (num_tiles - 1) * BLOCK_N
        scores = gl.where(positions[:, None] >= (first + keys)[None, :], scores, float("-inf"))
        row_max = gl.maximum(gl.max(scores, 1) * scale_log2, -3e38)  # a query may see no key of the tile
        weights = gl.exp2(scores * scale_log2 - row_max[:, None])
        row_sum = gl.sum(weights, 1)
        operand = gl.convert_layout(weights.to(DTYPE), WEIGHTS)
        acc = gl.zeros([ROWS, D], gl.float32, layout=RESULT)
        for i in range(1, num_tiles):
            stage = (before + i) % STAGES
            mbarrier.wait(k_full.index(stage), ((before + i) // STAGES) & 1)
            product = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            stage_before = (before + i - 1) % STAGES
            mbarrier.wait(v_full.index(stage_before), ((before + i - 1) // STAGES) & 1)
            sums = warpgroup_mma(operand, v_s.index(stage_before), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[product])
            mbarrier.arrive(k_empty.index(stage), count=1)
            first = begin + (num_tiles - 1 - i) * BLOCK_N
            if first + BLOCK_N > first_position + PART * ROWS:
                scores = gl.where(positions[:, None] >= (first + keys)[None, :], scores, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
            weights = gl.exp2(scores * scale_log2 - new_max[:, None])
            rescale = gl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + gl.sum(weights, 1)
            row_max = new_max
            acc = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(v_empty.index(stage_before), count=1)
            acc = acc * gl.convert_layout(rescale, RESULT_ROWS)[:, None]
            operand = gl.convert_layout(weights.to(DTYPE), WEIGHTS)
        mbarrier.arrive(q_empty, count=1)  # the next item's queries may come
        last = before + num_tiles - 1
        mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
        sums = warpgroup_mma(operand, v_s.index(last % STAGES), acc, is_async=True)
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # the query sees none of the split's keys
        acc = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(v_empty.index(last % STAGES), count=1)

        acc = acc / gl.convert_layout(row_sum, RESULT_ROWS)[:, None]
        inside = (in_result < num_left)[:, None]
        if partial >= 0:
            first_partial = partial.to(gl.int64) * BLOCK_M
            gl.store(partial_out_ptr + (first_partial + in_result)[:, None] * D + dims[None, :], acc, mask=inside)
            gl.store(partial_lse_ptr + first_partial + in_scores, row_max + gl.log2(row_sum), mask=in_scores < num_left)
        else:
            result = gl.convert_layout(acc.to(DTYPE), STORED)
            stored = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
            tokens = (first_token + stored).to(gl.int64)
            columns = gl.arange(0, D, layout=gl.SliceLayout(0, STORED))
            ptrs = out_ptr + tokens[:, None] * out_stride + head.to(gl.int64) * out_head_stride + columns[None, :]
            gl.store(ptrs, result, mask=(stored < num_left)[:, None])
        done += 1
        before += num_tiles
        mbarrier.wait(q_full, done & 1)
        fields = item_s.load(EVERY_FIELD)
        num_tiles = _field(fields, 0)
