"""The plan of a prefill: every query of every head meets each key that it sees in one item, whatever a batch is made of."""

# ruff: noqa: N803
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.kv_pools import int32

pytest.importorskip("triton", reason="the plan's device half is Triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("the plan's device half runs in the interpreter or on a GPU", allow_module_level=True)

import triton
import triton.language as tl

from rapid_llm.kernels.ops.attention import prefill_plan
from rapid_llm.kernels.ops.attention.prefill_plan import bounds_of, keys_of_a_split, plan_prefill, sequence_at
from rapid_llm.kernels.ops.tile_policy import tiles_of_one_batch

BLOCK_M, BLOCK_N = 16, 32


@triton.jit
def list_items(
    found_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    num_seqs,
    wanted,
    SEQS: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of a program's place: sequence, first query, first key, the key past its last; -1 where there is nothing left to do."""
    lanes = tl.arange(0, SEQS)
    split_keys = keys_of_a_split(lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, wanted, SEQS, SHORTEST, BLOCK_M, BLOCK_N)
    place = tl.program_id(0)
    sequence, tile = sequence_at(place, lanes, cu_seqlens_ptr, seq_lens_ptr, num_seqs, split_keys, SEQS, BLOCK_M)
    if sequence < num_seqs:
        _, _, first_query, _, seen, split = bounds_of(sequence, tile, cu_seqlens_ptr, seq_lens_ptr, split_keys, BLOCK_M)
        tl.store(found_ptr + place * 4, sequence)
        tl.store(found_ptr + place * 4 + 1, first_query)
        tl.store(found_ptr + place * 4 + 2, split * split_keys)
        tl.store(found_ptr + place * 4 + 3, tl.minimum(seen, split * split_keys + split_keys))


def plan_of(q_lens, lengths, num_heads, device, *, padding=0):
    """The plan, with pages of one row and ``padding`` tokens of nobody, and the items of one head as the device lists them."""
    num_tokens = sum(q_lens) + padding
    q = torch.empty(num_tokens, num_heads, 64, device=device)
    table = torch.empty(len(lengths), max(lengths), dtype=torch.int32, device=device)
    plan = plan_prefill(q, table, len(lengths), 1, max(q_lens), BLOCK_M, BLOCK_N)
    places = plan.num_items // num_heads
    # One place more than there are: nothing may be left for it.
    found = torch.full((places + 1, 4), -1, dtype=torch.int32, device=device)
    ends = int32([0, *torch.tensor(q_lens).cumsum(0)], device)
    list_items[(places + 1,)](found, ends, int32(lengths, device), len(lengths), plan.wanted, **plan.constants)
    return plan, found.tolist()


def keys_met(items, q_lens, lengths):
    """How often each query of each sequence meets each key: a matrix [queries, keys] a sequence."""
    met = [torch.zeros(queries, keys, dtype=torch.int32) for queries, keys in zip(q_lens, lengths, strict=True)]
    for sequence, first_query, begin, end in items:
        if sequence >= 0:
            met[sequence][first_query : first_query + BLOCK_M, begin : max(begin, end)] += 1
    return met


def assert_covers(items, q_lens, lengths):
    """Each query meets every key up to its own position once; those behind are masked by the kernels."""
    assert items[-1][0] == -1
    for met, queries, keys in zip(keys_met(items, q_lens, lengths), q_lens, lengths, strict=True):
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        assert (met[seen] == 1).all()
        assert (met <= 1).all()


# A sequence: its queries and the keys before these.
SEQUENCES = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 200)), min_size=1, max_size=6).filter(
    lambda each: any(queries for queries, _ in each)
)


@settings(max_examples=25, deadline=None)
@given(
    sequences=SEQUENCES,
    num_heads=st.sampled_from([1, 3]),
    padding=st.sampled_from([0, 1, 40]),
    programs=st.integers(1, 40),
    shortest=st.integers(1, 4),
)
def test_every_query_meets_every_key_that_it_sees_once(sequences, num_heads, padding, programs, shortest):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q_lens = [queries for queries, _ in sequences]
    lengths = [queries + before for queries, before in sequences]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_plan, "_PROGRAMS", programs)
        patch.setattr(prefill_plan, "_SHORTEST_SPLIT", shortest)
        _, items = plan_of(q_lens, lengths, num_heads, device, padding=padding)
    assert_covers(items, q_lens, lengths)


def test_more_sequences_than_lanes_are_found(device, monkeypatch):
    monkeypatch.setattr(prefill_plan, "_SEQS", 4)
    q_lens = [1 + number % 3 * 16 for number in range(9)]
    plan, items = plan_of(q_lens, q_lens, 1, device)
    assert not plan.wanted
    assert_covers(items, q_lens, q_lens)


def test_a_long_prefix_is_split_among_a_cards_programs_and_its_parts_have_memory(device):
    plan, items = plan_of([16], [16 + 8192], 2, device)
    splits = [item for item in items if item[0] == 0]
    assert plan.wanted == 33  # as many as tiles of keys make splits of the shortest length
    assert len(splits) == 33
    assert plan.partial_out.shape == (33 * 2, BLOCK_M, 64)
    assert plan.partial_lse.shape == (33 * 2, BLOCK_M)
    assert_covers(items, [16], [16 + 8192])


@pytest.mark.parametrize(
    ("num_tokens", "length", "num_heads"),
    [
        pytest.param(40, 240, 1, id="keys-of-one-split"),
        pytest.param(16 * 600, 16 * 600, 1, id="tiles-that-fill-a-card"),
        pytest.param(16, 2000, 300, id="heads-that-fill-a-card"),
    ],
)
def test_keys_are_not_split_where_it_gains_nothing(num_tokens, length, num_heads, device):
    q = torch.empty(num_tokens, num_heads, 64, device=device)
    table = torch.empty(1, length, dtype=torch.int32, device=device)
    plan = plan_prefill(q, table, 1, 1, num_tokens, BLOCK_M, BLOCK_N)
    assert plan.wanted == 0
    assert plan.partial_out.numel() == plan.partial_lse.numel() == 0


def test_keys_are_not_split_where_results_may_not_depend_on_the_batch(device):
    with tiles_of_one_batch():
        plan, items = plan_of([16], [16 + 8192], 2, device)
    assert plan.wanted == 0
    assert [item for item in items if item[0] == 0] == [[0, 0, 0, 16 + 8192]]


def test_the_heaviest_tiles_of_a_sequence_come_first(device):
    _, items = plan_of([64], [64], 1, device)
    assert [first_query for sequence, first_query, _, _ in items if sequence == 0] == [48, 32, 16, 0]
