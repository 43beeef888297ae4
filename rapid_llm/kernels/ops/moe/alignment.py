"""Pairs of a token and one of its columns of ids, brought together by expert in tiles of rows. No host looks at an id.

A pair's number is token * top_k + column. Two launches, or one for few pairs: a program counts a chunk of pairs by expert; then
each program knows from all counts where the pairs of its chunk go, and puts them there in their order, so that the result is the
same in every run. There are buffers for the worst that ids can be; tiles that nobody needs name expert -1.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs

_STEP = 128  # pairs that a program looks at together: each is compared with each
_ONE_PROGRAM = 256  # pairs that one program counts and places: a second launch costs more
_MOST_CHUNKS = 128  # whose counts every program reads
_LEAST_BINS = 128  # of a histogram: a thread has one at least
_TABLE = 4096  # elements of a table in a program's registers


def pairs_by_expert(ids: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of pairs, int32 [num_pairs], those of an expert together in rising order; and tiles, int32 [most, 3].

    A tile is an expert and the first and past-the-last place of its rows: at most ``block_m`` of them count. Behind the last one
    stands expert -1. Pairs whose id is no expert's have no place.

    Args:
        ids: [num_tokens, top_k], int32; inner stride 1, row stride free; a token at least.
    """
    num_tokens, top_k = ids.shape
    num_pairs = num_tokens * top_k
    most = (num_pairs + min(num_experts, num_pairs) * (block_m - 1)) // block_m
    pairs, tiles = ids.new_empty(num_pairs), ids.new_empty((most, 3))
    steps = triton.cdiv(num_pairs, _STEP)
    steps = steps if num_pairs <= _ONE_PROGRAM else triton.cdiv(steps, _MOST_CHUNKS)  # of a chunk
    chunks = triton.cdiv(num_pairs, steps * _STEP)
    bins = max(triton.next_power_of_2(num_experts), _LEAST_BINS)
    counts = ids.new_empty((chunks, num_experts)) if chunks > 1 else None
    pdl = dependent_launch(launch_device(ids))
    if counts is not None:
        _count_kernel[(chunks,)](
            ids,
            counts,
            ids.stride(0),
            num_pairs,
            num_experts,
            steps,
            TOP_K=top_k,
            STEP=_STEP,
            BINS=bins,
            num_warps=4,
            num_stages=1,
            **pdl,
        )
    _place_kernel[(chunks,)](
        ids, counts, pairs, tiles, ids.stride(0), num_pairs, num_experts, steps, chunks, most, triton.cdiv(most, chunks),
        TOP_K=top_k, BLOCK_M=block_m, STEP=_STEP, BINS=bins, ROWS=_TABLE // bins, num_warps=8, num_stages=1, **pdl,
    )  # fmt: skip
    return pairs, tiles


@triton.jit(do_not_specialize=["num_pairs", "steps"])
def _count_kernel(
    ids_ptr,
    counts_ptr,
    ids_stride,
    num_pairs,
    num_experts,
    steps,
    TOP_K: tl.constexpr,
    STEP: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    chunk = tl.program_id(0)
    counts = _counts(ids_ptr, ids_stride, chunk * steps, steps, num_pairs, num_experts, TOP_K, STEP, BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + chunk.to(tl.int64) * num_experts + bins, counts, mask=bins < num_experts)


@triton.jit(do_not_specialize=["num_pairs", "steps", "num_chunks", "num_tiles", "own_tiles"])
def _place_kernel(
    ids_ptr,
    counts_ptr,
    pairs_ptr,
    tiles_ptr,
    ids_stride,
    num_pairs,
    num_experts,
    steps,
    num_chunks,
    num_tiles,
    own_tiles,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STEP: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    before = tl.zeros((BINS,), tl.int32)  # pairs of each expert in chunks before this one
    if counts_ptr is None:
        counts = _counts(ids_ptr, ids_stride, 0, steps, num_pairs, num_experts, TOP_K, STEP, BINS)
    else:
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(0, num_chunks, ROWS):
            chunks = (start + tl.arange(0, ROWS))[:, None]
            of_chunks_ptrs = counts_ptr + chunks.to(tl.int64) * num_experts + bins[None, :]
            of_chunks = tl.load(of_chunks_ptrs, mask=(chunks < num_chunks) & (bins < num_experts)[None, :], other=0)
            counts += tl.sum(of_chunks, 0)
            before += tl.sum(tl.where(chunks < chunk, of_chunks, 0), 0)
    ends = tl.cumsum(counts, 0)
    tile_counts = (counts + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tile_counts, 0)
    _write_tiles(tiles_ptr, counts, ends, tile_counts, tile_ends, chunk * own_tiles, own_tiles, num_tiles, BLOCK_M, BINS, ROWS)

    places = ends - counts + before  # of the next pair of each expert
    for step in range(steps):
        numbers = (chunk * steps + step) * STEP + tl.arange(0, STEP)
        experts, there = _experts_of(ids_ptr, ids_stride, numbers, num_pairs, num_experts, TOP_K)
        lanes = tl.arange(0, STEP)
        earlier = (experts[:, None] == experts[None, :]) & (lanes[:, None] > lanes[None, :]) & there[None, :]
        own = tl.gather(places, experts, 0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(pairs_ptr + own, numbers, mask=there)
        places += tl.histogram(experts, BINS, mask=there)


@triton.jit
def _write_tiles(
    tiles_ptr,
    counts,
    ends,
    tile_counts,
    tile_ends,
    first,
    count,
    num_tiles,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``count`` tiles from number ``first`` on: expert, first place of a row and last."""
    bins = tl.arange(0, BINS)[None, :]
    tile_starts, tile_ends = (tile_ends - tile_counts)[None, :], tile_ends[None, :]
    for start in range(first, first + count, ROWS):
        tiles = (start + tl.arange(0, ROWS))[:, None]
        owns = (tiles >= tile_starts) & (tiles < tile_ends)
        experts = tl.sum(tl.where(owns, bins + 1, 0), 1) - 1
        rows = tl.sum(tl.where(owns, (ends - counts)[None, :] + (tiles - tile_starts) * BLOCK_M, 0), 1)
        last = tl.sum(tl.where(owns, ends[None, :], 0), 1)
        numbers = start + tl.arange(0, ROWS)
        mask = (numbers < num_tiles) & (numbers < first + count)
        tile_ptrs = tiles_ptr + numbers.to(tl.int64) * 3
        tl.store(tile_ptrs, experts, mask=mask)
        tl.store(tile_ptrs + 1, rows, mask=mask)
        tl.store(tile_ptrs + 2, last, mask=mask)


@triton.jit
def _counts(
    ids_ptr,
    ids_stride,
    first_step,
    steps,
    num_pairs,
    num_experts,
    TOP_K: tl.constexpr,
    STEP: tl.constexpr,
    BINS: tl.constexpr,
):
    """How many pairs of ``steps`` steps go to each expert, int32 [BINS]."""
    counts = tl.zeros((BINS,), tl.int32)
    for step in range(steps):
        numbers = (first_step + step) * STEP + tl.arange(0, STEP)
        experts, there = _experts_of(ids_ptr, ids_stride, numbers, num_pairs, num_experts, TOP_K)
        counts += tl.histogram(experts, BINS, mask=there)
    return counts


@triton.jit
def _experts_of(ids_ptr, ids_stride, numbers, num_pairs, num_experts, TOP_K: tl.constexpr):
    """The experts of pairs, and which of them there are; 0 for the others."""
    id_ptrs = ids_ptr + (numbers // TOP_K).to(tl.int64) * ids_stride + numbers % TOP_K
    ids = tl.load(id_ptrs, mask=numbers < num_pairs, other=-1)
    there = (ids >= 0) & (ids < num_experts)
    return tl.where(there, ids, 0), there
