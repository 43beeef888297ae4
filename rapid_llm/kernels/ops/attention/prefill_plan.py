"""Which program of a prefill attends what: tiles of queries, splits of their keys, and the merge of what the splits found.

The list of tiles is worked out on the device, by each program from the bounds of the sequences: the host knows how many tiles a
number of tokens and of sequences can make at most, and programs past the last tile leave at once. So neither lengths nor how many
of the tokens are prompts are part of a launch, which may stand in a graph.

A chunk of few tiles behind a long prefix would leave most of a device idle: where the tiles alone do not fill it, their keys are
split, as in Flash-Decoding (Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html), and a second kernel merges
what the splits found. Every program works out the same plan from the bounds and lengths. Inside ``tiles_of_one_batch`` nothing is
split, since where depends on what else is in the batch.

The device's part is called by kernels of Triton and of Gluon: these hand in the ``lanes`` 0 .. SEQS, whose layout Gluon's choose.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.ops.tile_policy import is_of_one_batch

_SEQS = 128  # bounds that a program looks at together
_PROGRAMS = 264  # that keys are split for: two for each multiprocessor of a large card, so that three tiles leave few idle
_SHORTEST_SPLIT = 8  # tiles of keys, so that a split is longer than what merging it takes
_MERGED_ROWS = 32  # of a tile, by one program of the merge


@dataclass(frozen=True)
class PrefillPlan:
    """What the host knows of a launch.

    Attributes:
        num_items: pairs of a split (or an undivided tile) and a head that there are at most; item i is of head i % num_heads.
        wanted: splits of all tiles that there is room for, 0 where keys are not split.
        partial_out: [wanted * num_heads, BLOCK_M, head_dim], fp32, of items that are one of several splits.
        partial_lse: [wanted * num_heads, BLOCK_M], fp32, in base 2; the least number there is for a query without keys.
        constants: SEQS, SHORTEST, BLOCK_M and BLOCK_N of the kernels.
    """

    num_items: int
    wanted: int
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    constants: dict[str, int]


def plan_prefill(
    q: torch.Tensor, page_table: torch.Tensor, num_seqs: int, page_size: int, max_seqlen_q: int, block_m: int, block_n: int
) -> PrefillPlan:
    """The plan of queries [num_tokens, num_heads, head_dim] in tiles of ``block_m``, their keys in tiles of ``block_n``."""
    num_tokens, num_heads, head_dim = q.shape
    num_tiles = min(num_tokens // block_m + num_seqs, num_seqs * triton.cdiv(max_seqlen_q, block_m))  # the last may be ragged
    shortest = _SHORTEST_SPLIT * block_n
    wanted = _splits(num_tiles, num_heads, num_tokens // block_m, triton.cdiv(page_table.shape[1] * page_size, shortest))
    return PrefillPlan(
        num_items=max(num_tiles, wanted) * num_heads,
        wanted=wanted,
        partial_out=torch.empty((wanted * num_heads, block_m, head_dim), dtype=torch.float32, device=q.device),
        partial_lse=torch.empty((wanted * num_heads, block_m), dtype=torch.float32, device=q.device),
        constants={"SEQS": _SEQS, "SHORTEST": shortest, "BLOCK_M": block_m, "BLOCK_N": block_n},
    )


def merge_splits(plan: PrefillPlan, out: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Write into ``out`` the rows whose keys were split, if the launch had room for splits."""
    if not plan.wanted:
        return
    num_heads, head_dim, block_m = out.shape[1], out.shape[2], plan.constants["BLOCK_M"]
    rows = min(_MERGED_ROWS, block_m)
    _merge_kernel[(plan.wanted * num_heads, block_m // rows)](
        plan.partial_out, plan.partial_lse, out, cu_seqlens_q, seq_lens, out.stride(0), out.stride(1),
        seq_lens.shape[0], plan.wanted,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, PADDED_DIM=padded(head_dim), ROWS=rows, **plan.constants,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def padded(head_dim: int) -> int:
    """The side of a matrix product that holds a head."""
    return max(int(triton.next_power_of_2(head_dim)), 16)


def _splits(num_tiles: int, num_heads: int, full_tiles: int, most_of_a_tile: int) -> int:
    """Splits of all tiles that a launch has room for, each for all heads; 0 where keys are not split.

    Args:
        num_tiles: that there are at most.
        num_heads: programs of a split.
        full_tiles: that as many tokens make, padding included.
        most_of_a_tile: splits of the keys that a row of the page table can hold.
    """
    wanted = min(_PROGRAMS // num_heads, num_tiles * most_of_a_tile)
    fills_a_device = full_tiles >= 2 * wanted  # even where half of the tokens are padding
    return 0 if is_of_one_batch() or most_of_a_tile == 1 or fills_a_device else wanted


@triton.jit(do_not_specialize=["num_seqs", "wanted"])
def _merge_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    out_stride,
    out_head_stride,
    num_seqs,
    wanted,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SEQS: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows of a tile, from its splits in their order; by the program that stands where the first of these stood."""
    place, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    lanes = tl.arange(0, SEQS)
    split_keys = keys_of_a_split(lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, wanted, SEQS, SHORTEST, BLOCK_M, BLOCK_N)
    sequence, tile = sequence_at(place, lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, split_keys, SEQS, BLOCK_M)
    if sequence >= num_seqs:
        return
    first_token, num_queries, first_query, _, seen, split = bounds_of(
        sequence, tile, cu_seqlens_ptr, seq_lens_ptr, split_keys, BLOCK_M
    )
    if (split > 0) | (split_keys >= seen):
        return
    in_tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    present = first_query + in_tile < num_queries
    inside = present[:, None] & (dims < HEAD_DIM)[None, :]  # [R, D]
    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    # Every query sees the first key, so a maximum is finite from the first split on.
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for split in range(tl.cdiv(seen, split_keys)):
        partials = (tl.program_id(0) + split * NUM_HEADS).to(tl.int64) * BLOCK_M + in_tile
        lse = tl.load(partial_lse_ptr + partials, mask=present, other=0.0)
        results = tl.load(partial_out_ptr + partials[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        new_largest = tl.maximum(largest, lse)
        rescale = tl.exp2(largest - new_largest)
        weights = tl.exp2(lse - new_largest)
        total = total * rescale + weights
        acc = acc * rescale[:, None] + results * weights[:, None]
        largest = new_largest
    tokens = (first_token + first_query + in_tile).to(tl.int64)
    out_ptrs = out_ptr + tokens[:, None] * out_stride + head.to(tl.int64) * out_head_stride + dims[None, :]
    tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def keys_of_a_split(
    lanes,
    cu_seqlens_ptr,
    seq_lens_ptr,
    num_seqs,
    wanted,
    SEQS: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys of a split, whole tiles of them: as few as make at most ``wanted`` splits of all; more than there are for one each."""
    length = 1 << 30
    if wanted > 0:
        tiles, keys = _num_splits(lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, 1 << 30, SEQS, BLOCK_M)
        if tiles < wanted:
            length = tl.maximum(tl.cdiv(keys, wanted * BLOCK_N).to(tl.int32) * BLOCK_N, SHORTEST)
            splits, _ = _num_splits(lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, length, SEQS, BLOCK_M)
            if splits > wanted:  # a tile has one split more, at most, than its keys divided by their length
                length = tl.cdiv(keys, (wanted - tiles) * BLOCK_N).to(tl.int32) * BLOCK_N
    return length


@triton.jit
def _num_splits(lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, split_keys, SEQS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Splits of all tiles, and the keys of all tiles, as if each had all of its sequence's, int64."""
    splits, keys = 0, tl.cast(0, tl.int64)
    for begin in range(0, num_seqs, SEQS):
        tiles, of_each, _ = _tiles_of(begin + lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, BLOCK_M)
        splits += tl.sum(tiles * tl.cdiv(of_each, split_keys), 0)
        keys += tl.sum(tiles.to(tl.int64) * of_each, 0)
    return splits, keys


@triton.jit
def _tiles_of(each, cu_seqlens_ptr, seq_lens_ptr, num_seqs, BLOCK_M: tl.constexpr):
    """Tiles of the sequences ``each``, the keys of each, and which of them there are."""
    present = each < num_seqs
    ends = tl.load(cu_seqlens_ptr + each + 1, mask=present, other=0)
    starts = tl.load(cu_seqlens_ptr + each, mask=present, other=0)
    keys = tl.load(seq_lens_ptr + each, mask=present, other=0)
    return tl.cdiv(ends - starts, BLOCK_M), keys, present


@triton.jit
def sequence_at(place, lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, split_keys, SEQS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence of split ``place`` of all, num_seqs where there are not so many, and which of the sequence's it is."""
    sequence, first, before = 0, 0, 0
    for begin in range(0, num_seqs, SEQS):
        tiles, keys, present = _tiles_of(begin + lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, BLOCK_M)
        splits = tiles * tl.cdiv(keys, split_keys)
        passed = (before + tl.cumsum(splits, 0) <= place) & present
        sequence += tl.sum(passed.to(tl.int32), 0)
        first += tl.sum(tl.where(passed, splits, 0), 0)
        before += tl.sum(splits, 0)
    return sequence, place - first


@triton.jit
def bounds_of(sequence, tile, cu_seqlens_ptr, seq_lens_ptr, split_keys, BLOCK_M: tl.constexpr):
    """Of a sequence's split ``tile``: the sequence's first token and queries, its tile's first query and that one's position,
    the keys that any query of the tile sees, and which of the tile's splits it is. Tiles with the most keys come first."""
    first_token = tl.load(cu_seqlens_ptr + sequence)
    num_queries = tl.load(cu_seqlens_ptr + sequence + 1) - first_token
    num_keys = tl.load(seq_lens_ptr + sequence)
    num_splits = tl.cdiv(num_keys, split_keys)
    first_query = (tl.cdiv(num_queries, BLOCK_M) - 1 - tile // num_splits) * BLOCK_M
    first_position = num_keys - num_queries + first_query
    seen = tl.minimum(first_position + BLOCK_M, num_keys)
    return first_token, num_queries, first_query, first_position, seen, tile % num_splits
