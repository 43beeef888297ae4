"""Prefill and decode attention against their float64 twins, on every row that this machine runs."""

import importlib

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.ops.fallback import attention as fallback
from tests import reference
from tests.kernels.kv_pools import PAGE_SIZE, PagedKeys, int32, zero_pool
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of

HEAD_DIMS = [64, 80, 96, 112, 128, 192, 256]
HEADS = [
    pytest.param(ratio * kv_heads, kv_heads, id=f"{ratio * kv_heads}-to-{kv_heads}")
    for ratio, kv_heads in ((1, 4), (2, 3), (3, 3), (4, 2), (5, 1), (6, 1), (7, 1), (8, 2))
]


def each_native_row_of(op, suffix=""):
    """As each_row_of, without the torch rows; ``suffix`` picks those whose name ends so."""
    rows = [row for row in each_row_of(op).args[1] if "triton" in row.values[0].spec.requires.packages]
    return pytest.mark.parametrize(op, [row for row in rows if row.id.endswith(suffix)])


def module_of(row):
    """The module that a row's function lives in; its knobs are turned there."""
    return importlib.import_module(row.spec.target.partition(":")[0])


def prefill_plan():
    """The module that divides a prefill among programs; its knobs are turned there. Imports Triton."""
    return importlib.import_module("rapid_llm.kernels.ops.attention.prefill_plan")


def prefill(op, keys, q, q_lens, out=None, scale=None):
    """Attend packed queries that are the last tokens of their sequences; a fresh output unless one is given."""
    ends = torch.tensor([0, *q_lens]).cumsum(0).to(device=q.device, dtype=torch.int32)
    arguments = {
        **keys.arguments(),
        "cu_seqlens_q": ends,
        "seq_lens": int32(keys.lengths, q.device),
        "sm_scale": scale or q.shape[2] ** -0.5,
    }
    if op is reference.flashattention2_nopad:
        return op(q, **arguments)
    return op(q, **arguments, out=torch.empty_like(q) if out is None else out, max_seqlen_q=max(q_lens, default=0))


def decode(op, keys, q, out=None):
    """Attend one query a sequence."""
    arguments = {**keys.arguments(), "seq_lens": int32(keys.lengths, q.device), "sm_scale": q.shape[2] ** -0.5}
    if op is reference.flash_decoding:
        return op(q, **arguments)
    return op(q, **arguments, out=torch.empty_like(q) if out is None else out)


def queries(num_tokens, num_heads, head_dim, device, dtype=torch.float32):
    return torch.randn(num_tokens, num_heads, head_dim, device=device).to(dtype)


def assert_attended(actual, expected):
    """Means of values of size 1. fp32: some roundings of scores of size 4 and of the sum. Else one eps, and half an eps for
    weights that a kernel may round before it multiplies them."""
    eps = torch.finfo(actual.dtype).eps
    is_fp32 = actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5 if is_fp32 else eps, atol=5e-6 if is_fp32 else eps)


@each_row_of("flashattention2_nopad")
def test_prefill_holds_over_its_whole_sweep(flashattention2_nopad, device):
    assert broken_cases(flashattention2_nopad, device) == []


@each_row_of("flash_decoding")
def test_decode_holds_over_its_whole_sweep(flash_decoding, device):
    assert broken_cases(flash_decoding, device) == []


@each_row_of("flashattention2_nopad")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_prefill_honours_every_group_size(flashattention2_nopad, num_heads, num_kv_heads, device):
    keys = PagedKeys([40, 17], num_kv_heads, 64, device)
    q = queries(33 + 17, num_heads, 64, device)
    expected = prefill(reference.flashattention2_nopad, keys, q, [33, 17])
    assert_attended(prefill(flashattention2_nopad, keys, q, [33, 17]), expected)


@each_row_of("flash_decoding")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_decode_honours_every_group_size(flash_decoding, num_heads, num_kv_heads, device):
    keys = PagedKeys([40, 17, 1], num_kv_heads, 64, device)
    q = queries(3, num_heads, 64, device)
    assert_attended(decode(flash_decoding, keys, q), decode(reference.flash_decoding, keys, q))


@pytest.mark.case("G6")
@each_row_of("flashattention2_nopad")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_reads_and_writes_head_views_of_wider_buffers(flashattention2_nopad, head_dim, dtype, device):
    keys = PagedKeys([21, 5], 1, head_dim, device, dtype)
    wide_q = torch.full((26, 3, head_dim + 8), float("nan"), dtype=dtype, device=device)
    wide_out = torch.full((26, 3, head_dim + 8), 7.0, dtype=dtype, device=device)
    q, out = wide_q[..., :head_dim], wide_out[..., :head_dim]
    q.copy_(queries(26, 3, head_dim, device))
    expected = prefill(reference.flashattention2_nopad, keys, q, [21, 5])

    prefill(flashattention2_nopad, keys, q, [21, 5], out=out)

    assert_attended(out, expected)
    assert (wide_out[..., head_dim:] == 7.0).all()


@pytest.mark.case("G6")
@each_row_of("flash_decoding")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_reads_and_writes_head_views_of_wider_buffers(flash_decoding, head_dim, dtype, device):
    keys = PagedKeys([21, 5, 33], 1, head_dim, device, dtype)
    wide_q = torch.full((3, 3, head_dim + 8), float("nan"), dtype=dtype, device=device)
    wide_out = torch.full((3, 3, head_dim + 8), 7.0, dtype=dtype, device=device)
    q, out = wide_q[..., :head_dim], wide_out[..., :head_dim]
    q.copy_(queries(3, 3, head_dim, device))
    expected = decode(reference.flash_decoding, keys, q)

    decode(flash_decoding, keys, q, out=out)

    assert_attended(out, expected)
    assert (wide_out[..., head_dim:] == 7.0).all()


@each_row_of("flashattention2_nopad")
@pytest.mark.parametrize("length", [16, 17, 33], ids=lambda length: f"{length}-tokens")
def test_two_chunks_at_every_cut_equal_one_prefill(flashattention2_nopad, length, device):
    keys = PagedKeys([length], 2, 64, device)
    q = queries(length, 4, 64, device)
    whole = prefill(flashattention2_nopad, keys, q, [length])
    for cut in range(1, length):
        keys.lengths = [cut]
        first = prefill(flashattention2_nopad, keys, q[:cut], [cut])
        keys.lengths = [length]
        second = prefill(flashattention2_nopad, keys, q[cut:], [length - cut])
        torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-5, atol=5e-6)


@each_row_of("flashattention2_nopad")
@each_row_of("flash_decoding")
def test_decode_equals_the_last_token_of_a_prefill(flashattention2_nopad, flash_decoding, device):
    keys = PagedKeys([50, 1, 16], 3, 64, device)
    q = queries(67, 9, 64, device)
    whole = prefill(flashattention2_nopad, keys, q, [50, 1, 16])
    last = [49, 50, 66]
    torch.testing.assert_close(decode(flash_decoding, keys, q[last]), whole[last], rtol=1e-5, atol=5e-6)


@each_row_of("flashattention2_nopad")
def test_a_sequence_is_attended_alike_alone_and_packed(flashattention2_nopad, device):
    keys = PagedKeys([30, 45, 9], 2, 64, device)
    q_lens = [30, 12, 9]
    q = queries(sum(q_lens), 4, 64, device)
    packed = prefill(flashattention2_nopad, keys, q, q_lens)
    keys.table_rows, keys.lengths = keys.table_rows[1:2], [45]
    alone = prefill(flashattention2_nopad, keys, q[30:42], [12])
    torch.testing.assert_close(packed[30:42], alone, rtol=1e-5, atol=5e-6)


@each_native_row_of("flashattention2_nopad")
@pytest.mark.parametrize(("programs", "shortest"), [(64, 1), (28, 2)])
def test_keys_may_be_split_among_any_number_of_programs(flashattention2_nopad, programs, shortest, device, monkeypatch):
    """Also where a split ends before, or begins behind, what some query of its tile sees."""
    monkeypatch.setattr(prefill_plan(), "_PROGRAMS", programs)
    monkeypatch.setattr(prefill_plan(), "_SHORTEST_SPLIT", shortest)
    keys, q_lens = PagedKeys([300, 70, 1, 210], 2, 64, device), [40, 3, 0, 17]
    q = queries(sum(q_lens), 4, 64, device)
    assert_attended(prefill(flashattention2_nopad, keys, q, q_lens), prefill(reference.flashattention2_nopad, keys, q, q_lens))


@each_native_row_of("flashattention2_nopad")
@pytest.mark.parametrize(
    ("page_size", "dtype", "split"),
    [
        pytest.param(16, torch.bfloat16, False, id="16-bf16-whole"),
        *(pytest.param(size, torch.bfloat16, True, id=f"{size}-bf16-split") for size in (8, 16, 128)),
        *(pytest.param(size, torch.float16, True, id=f"{size}-fp16-split") for size in (32, 64)),
    ],
)
def test_heads_of_128_in_16_bits_are_attended_in_pages_of_any_size(
    flashattention2_nopad, page_size, dtype, split, device, monkeypatch
):
    """What the Gluon row's own kernel takes: queries that lie among keys and values, some rows of nobody before and behind."""
    if split:
        monkeypatch.setattr(prefill_plan(), "_PROGRAMS", 64)
        monkeypatch.setattr(prefill_plan(), "_SHORTEST_SPLIT", 1)
    keys, q_lens, lead = PagedKeys([300, 70, 1, 140], 2, 128, device, dtype, page_size), [140, 3, 0, 140], 5
    packed = torch.full((lead + sum(q_lens) + 7, 4 + 2 * 2, 128), float("nan"), dtype=dtype, device=device)
    q, out = packed[:, :4], torch.full((len(packed), 4, 128), 7.0, dtype=dtype, device=device)
    attended = slice(lead, lead + sum(q_lens))
    q[attended] = queries(sum(q_lens), 4, 128, device, dtype)
    expected = prefill(reference.flashattention2_nopad, keys, q[attended], q_lens)
    bounds = int32([lead, *(lead + torch.tensor(q_lens).cumsum(0)).tolist()], device)

    flashattention2_nopad(
        q, **keys.arguments(), cu_seqlens_q=bounds, seq_lens=int32(keys.lengths, device), sm_scale=128**-0.5, out=out,
        max_seqlen_q=max(q_lens),
    )  # fmt: skip

    assert_attended(out[attended], expected)
    assert (out[:lead] == 7.0).all()
    assert (out[attended.stop :] == 7.0).all()


@each_row_of("flashattention2_nopad")
def test_a_sequence_without_queries_is_skipped_and_padding_rows_keep_what_they_hold(flashattention2_nopad, device):
    keys = PagedKeys([5, 7, 0, 4], 1, 64, device)
    q = queries(12, 2, 64, device)
    out = torch.full_like(q, 7.0)
    expected = prefill(reference.flashattention2_nopad, keys, q, [5, 0, 0, 4])
    prefill(flashattention2_nopad, keys, q, [5, 0, 0, 4], out=out)
    assert_attended(out[:9], expected[:9])
    assert (out[9:] == 7.0).all()


@each_row_of("flashattention2_nopad")
@pytest.mark.parametrize("lead", [1, 3, 130], ids=str)
def test_rows_before_the_first_chunk_keep_what_they_hold(flashattention2_nopad, lead, device):
    keys = PagedKeys([70, 20, 4], 1, 64, device)
    q = queries(lead + 33 + 20 + 4, 2, 64, device)
    out = torch.full_like(q, 7.0)
    arguments = {**keys.arguments(), "seq_lens": int32(keys.lengths, device), "sm_scale": 0.125}
    bounds = int32([lead, lead + 33, lead + 53, lead + 57], device)
    flashattention2_nopad(q, **arguments, cu_seqlens_q=bounds, out=out, max_seqlen_q=len(q))
    assert_attended(out[lead:], prefill(reference.flashattention2_nopad, keys, q[lead:], [33, 20, 4], scale=0.125))
    assert (out[:lead] == 7.0).all()


@each_row_of("flash_decoding")
@pytest.mark.parametrize("lengths", [[0], [0, 0], [3, 0, 20], [0, 1]], ids=str)
def test_padding_writes_zeros_and_reads_neither_table_nor_pool(flash_decoding, lengths, device):
    keys = PagedKeys(lengths, 1, 64, device)
    q = queries(len(lengths), 2, 64, device)
    expected = decode(reference.flash_decoding, keys, q)
    for index, length in enumerate(lengths):
        if not length:
            keys.page_table[int(keys.table_rows[index])] = -(1 << 30)
            keys.table_rows[index] = (1 << 30) if index % 2 else -1
            q[index] = float("nan")
    out = decode(flash_decoding, keys, q)
    assert_attended(out, expected)
    assert all((row == 0).all() for row, length in zip(out, lengths, strict=True) if not length)


@each_row_of("flashattention2_nopad")
@each_row_of("flash_decoding")
@pytest.mark.parametrize("junk", [-1, -(1 << 31), (1 << 31) - 1], ids=str)
def test_table_entries_past_the_end_may_hold_anything(flashattention2_nopad, flash_decoding, junk, device):
    keys = PagedKeys([20, 35], 1, 64, device)
    q = queries(20 + 2, 2, 64, device)
    expected = prefill(reference.flashattention2_nopad, keys, q, [20, 2])
    for row, length in zip(keys.table_rows.tolist(), keys.lengths, strict=True):
        keys.page_table[row, -(-length // PAGE_SIZE) :] = junk
    assert_attended(prefill(flashattention2_nopad, keys, q, [20, 2]), expected)
    last = decode(flash_decoding, keys, q[[19, 21]])
    assert_attended(last, expected[[19, 21]])


@each_row_of("flash_decoding")
def test_pages_of_a_finished_sequence_serve_the_next_one(flash_decoding, device):
    keys = PagedKeys([40, 23], 2, 64, device)
    row = int(keys.table_rows[0])
    keys.k_pool[keys.slots_of(row, 40)] = float("nan")  # its owner left
    keys.v_pool[keys.slots_of(row, 40)] = float("inf")
    keys.page_table[row, :3] = keys.page_table[row, [2, 0, 1]].clone()
    slots = keys.slots_of(row, 19)
    keys.k_pool[slots], keys.v_pool[slots] = queries(19, 2, 64, device), queries(19, 2, 64, device)
    keys.lengths = [19, 23]
    q = queries(2, 4, 64, device)
    assert_attended(decode(flash_decoding, keys, q), decode(reference.flash_decoding, keys, q))


@each_row_of("flash_decoding")
@each_row_of("flashattention2_nopad")
def test_two_sequences_share_the_pages_of_their_prefix(flash_decoding, flashattention2_nopad, device):
    keys = PagedKeys([40, 37], 2, 64, device)
    first, second = keys.table_rows.tolist()
    keys.page_table[second, :2] = keys.page_table[first, :2]
    q = queries(2, 4, 64, device)
    assert_attended(decode(flash_decoding, keys, q), decode(reference.flash_decoding, keys, q))
    q = queries(8 + 5, 4, 64, device)
    expected = prefill(reference.flashattention2_nopad, keys, q, [8, 5])
    assert_attended(prefill(flashattention2_nopad, keys, q, [8, 5]), expected)


@pytest.mark.case("A1")
@each_row_of("flash_decoding")
@each_row_of("flashattention2_nopad")
def test_keys_past_two_to_the_31_elements_are_read_from_where_they_are(flash_decoding, flashattention2_nopad, device):
    """2,048 elements a row: page 65,536 starts at element 2**31. A 32-bit offset reads zeros, or what is before the pool."""
    pool = zero_pool(1_048_576 + 2 * PAGE_SIZE, 8, 128, device)
    keys = PagedKeys([20, 40], 8, 128, device, torch.bfloat16)
    keys.k_pool, keys.v_pool = pool[:, :8], pool[:, 8:]
    keys.page_table = int32([[65_536, 0, 7], [65_537, 65_535, 3]], device)
    keys.table_rows = int32([1, 0], device)
    for row, length in ((1, 20), (0, 40)):
        slots = keys.slots_of(row, length)
        keys.k_pool[slots] = queries(length, 8, 128, device, torch.bfloat16)
        keys.v_pool[slots] = queries(length, 8, 128, device, torch.bfloat16)
    q = queries(2, 8, 128, device, torch.bfloat16)
    expected = decode(reference.flash_decoding, keys, q)
    assert_attended(decode(flash_decoding, keys, q), expected)
    assert_attended(prefill(flashattention2_nopad, keys, q, [1, 1]), expected)


@each_row_of("flash_decoding")
@each_row_of("flashattention2_nopad")
def test_scores_of_several_hundred_neither_overflow_nor_blur(flash_decoding, flashattention2_nopad, device):
    keys = PagedKeys([64, 3], 1, 64, device)
    q = queries(2, 2, 64, device)
    for sequence, best in ((0, 41), (1, 1)):  # each query is 60 times one of its keys
        slot = int(keys.slots_of(int(keys.table_rows[sequence]), best + 1)[-1])
        q[sequence] = 60 * keys.k_pool[slot]
        value = keys.v_pool[slot].expand(2, 64)
        torch.testing.assert_close(decode(flash_decoding, keys, q)[sequence], value)
        torch.testing.assert_close(prefill(flashattention2_nopad, keys, q, [1, 1])[sequence], value)


@pytest.mark.parametrize("bound", [1, 3000, 1 << 24], ids=str)
def test_the_fallback_decodes_alike_however_it_cuts_the_batch(bound, device, monkeypatch):
    keys = PagedKeys([40, 0, 17, 1, 33, 40], 2, 64, device)
    q = queries(6, 4, 64, device)
    monkeypatch.setattr(fallback, "_GATHER_ELEMENTS", bound)
    assert_attended(decode(fallback.flash_decoding, keys, q), decode(reference.flash_decoding, keys, q))


@pytest.mark.parametrize("bound", [1, 700, 1 << 22], ids=str)
def test_the_fallback_prefills_alike_however_it_cuts_the_queries(bound, device, monkeypatch):
    keys = PagedKeys([100], 2, 64, device)
    q = queries(37, 4, 64, device)
    monkeypatch.setattr(fallback, "_MASK_ELEMENTS", bound)
    expected = prefill(reference.flashattention2_nopad, keys, q, [37])
    assert_attended(prefill(fallback.flashattention2_nopad, keys, q, [37]), expected)


@pytest.mark.case("G13")
@each_row_of("flash_decoding")
@each_row_of("flashattention2_nopad")
def test_attention_of_nothing_is_empty(flash_decoding, flashattention2_nopad, device):
    nobody = PagedKeys([], 1, 64, device)
    none = torch.empty(0, 2, 64, device=device)
    assert decode(flash_decoding, nobody, none).shape == (0, 2, 64)
    assert prefill(flashattention2_nopad, nobody, none, []).shape == (0, 2, 64)
    assert prefill(flashattention2_nopad, PagedKeys([4], 1, 64, device), none, [0]).shape == (0, 2, 64)


MISREAD = [
    pytest.param({"q": lambda q: torch.stack([q, q], dim=-1)[..., 0]}, id="every-other-entry"),
    pytest.param({"q": lambda q: q.half()}, id="mixed-dtypes"),
    pytest.param({"q": lambda q: q[:, :3]}, id="heads-not-a-multiple"),
    pytest.param({"v_pool": lambda pool: pool[1:]}, id="pools-of-two-lengths"),
    pytest.param({"page_table": lambda table: table.long()}, id="int64-table"),
    pytest.param({"table_rows": lambda rows: rows[:1]}, id="a-row-short"),
    pytest.param({"seq_lens": lambda lengths: lengths.long()}, id="int64-lengths"),
    pytest.param({"page_size": lambda _: 0}, id="page-size-0"),
]


def refused(op, arguments, changes):
    """Whether ``op`` refuses the arguments after the changes and leaves its output as it was."""
    arguments = {name: changes[name](value) if name in changes else value for name, value in arguments.items()}
    out = torch.full(arguments["q"].shape, 7.0, device=arguments["q"].device)
    with pytest.raises(KernelInputError):
        op(**arguments, out=out)
    return bool((out == 7.0).all())


def decode_arguments(device):
    keys = PagedKeys([20, 35], 2, 64, device)
    return {**keys.arguments(), "q": queries(2, 4, 64, device), "seq_lens": int32([20, 35], device), "sm_scale": 0.125}


def prefill_arguments(device):
    arguments = {**decode_arguments(device), "q": queries(26, 4, 64, device)}
    return {**arguments, "cu_seqlens_q": int32([0, 20, 26], device), "max_seqlen_q": 20}


@pytest.mark.case("G11")
@each_row_of("flash_decoding")
@pytest.mark.parametrize("changes", MISREAD)
def test_decode_refuses_what_it_would_misread(flash_decoding, changes, device):
    assert refused(flash_decoding, decode_arguments(device), changes)


@pytest.mark.case("G11")
@each_row_of("flashattention2_nopad")
@pytest.mark.parametrize("changes", [*MISREAD, pytest.param({"cu_seqlens_q": lambda ends: ends.long()}, id="int64-offsets")])
def test_prefill_refuses_what_it_would_misread(flashattention2_nopad, changes, device):
    assert refused(flashattention2_nopad, prefill_arguments(device), changes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"page_table": lambda table: table[:, :1]}, id="more-keys-than-columns"),
        pytest.param({"seq_lens": lambda lengths: -lengths}, id="negative-length"),
    ],
)
def test_the_fallback_refuses_lengths_that_a_launch_could_not_read(changes, device):
    assert refused(fallback.flash_decoding, decode_arguments(device), changes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"page_table": lambda table: table[:, :1]}, id="more-keys-than-columns"),
        pytest.param({"cu_seqlens_q": lambda ends: ends - 1}, id="first-offset-below-0"),
        pytest.param({"cu_seqlens_q": lambda ends: ends.flip(0)}, id="falling-offsets"),
        pytest.param({"cu_seqlens_q": lambda ends: ends * 3}, id="offsets-past-the-tokens"),
        pytest.param({"seq_lens": lambda lengths: lengths - 30}, id="more-queries-than-keys"),
        pytest.param({"max_seqlen_q": lambda _: 5}, id="max-seqlen-too-small"),
    ],
)
def test_the_fallback_refuses_chunks_that_do_not_fit_their_sequences(changes, device):
    assert refused(fallback.flashattention2_nopad, prefill_arguments(device), changes)


# ---- what only native rows have: splits, tiles, grids, limits


@each_native_row_of("flash_decoding")
@pytest.mark.parametrize(("programs", "longest"), [(1, 1 << 14), (24, 1 << 14), (4096, 1 << 14), (1, 128)], ids=str)
def test_however_many_splits_a_decode_is_cut_into_it_merges_to_the_same(flash_decoding, programs, longest, device, monkeypatch):
    monkeypatch.setattr(module_of(flash_decoding), "_PROGRAMS", programs)
    monkeypatch.setattr(module_of(flash_decoding), "_LONGEST_SPLIT", longest)
    monkeypatch.setattr(module_of(flash_decoding), "_MERGED_AT_ONCE", 2)
    keys = PagedKeys([700, 0, 128, 129, 1, 385], 1, 64, device)
    q = queries(6, 2, 64, device)
    assert_attended(decode(flash_decoding, keys, q), decode(reference.flash_decoding, keys, q))


@each_native_row_of("flash_decoding")
def test_splits_of_very_unlike_scores_merge_without_overflow(flash_decoding, device, monkeypatch):
    monkeypatch.setattr(module_of(flash_decoding), "_MERGED_AT_ONCE", 1)
    keys = PagedKeys([600], 1, 64, device)
    slots = keys.slots_of(int(keys.table_rows[0]), 600)
    keys.k_pool[slots[:256]] *= 60.0  # the first split's scores reach several hundred, the others' do not
    q = queries(1, 2, 64, device) * 10
    expected = decode(reference.flash_decoding, keys, q)
    torch.testing.assert_close(decode(flash_decoding, keys, q).double(), expected, rtol=1e-4, atol=1e-4)  # fp32 scores of 1e4


@each_native_row_of("flash_decoding", "_fixed_splits")
def test_fixed_splits_give_a_sequence_the_same_bits_alone_and_in_any_batch(flash_decoding, device):
    lengths = [600, 37, 0, 300, 256]
    keys = PagedKeys(lengths, 2, 64, device)
    q, rows = queries(5, 4, 64, device), keys.table_rows
    together = decode(flash_decoding, keys, q)
    for index, length in enumerate(lengths):
        keys.table_rows, keys.lengths = rows[index : index + 1], [length]
        assert torch.equal(decode(flash_decoding, keys, q[index : index + 1]), together[index : index + 1])


@each_native_row_of("flash_decoding")
def test_a_plan_gives_every_key_to_one_split_and_every_split_a_program(flash_decoding):
    module = module_of(flash_decoding)
    for capacity in (0, 16, 1000, 16_384, 131_072, 1 << 22):
        for programs in (1, 8, 512, 100_000):
            for fixed in (False, True):
                wanted, shortest, longest = module._plan(programs, capacity, 64, fixed)
                most = module._most_splits(capacity, wanted, shortest, longest)
                assert 1 <= most <= max(module._PROGRAMS, module._FIXED_SPLITS)
                assert shortest % 64 == longest % 64 == 0
                for length in (length for length in (0, 1, 63, 64, 65, capacity // 3, capacity) if length <= capacity):
                    split = -(-min(max(-(-length // wanted), shortest), longest) // 64) * 64  # what each program computes
                    assert -(-length // split) <= most, (capacity, programs, fixed, length)


@each_native_row_of("flash_decoding")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_of_more_heads_than_a_tile_is_decoded_in_tiles(flash_decoding, dtype, device):
    keys = PagedKeys([40, 3], 1, 64, device, dtype)
    q = queries(2, 70, 64, device, dtype)
    assert_attended(decode(flash_decoding, keys, q), decode(reference.flash_decoding, keys, q))


@each_native_row_of("flash_decoding")
@each_native_row_of("flashattention2_nopad")
@pytest.mark.parametrize("page_size", [1, 2, 8, 32, 128, 256])
def test_pages_of_every_power_of_two_are_read(flash_decoding, flashattention2_nopad, page_size, device):
    keys = PagedKeys([150, 9], 1, 64, device, page_size=page_size)
    q = queries(30 + 9, 2, 64, device)
    expected = prefill(reference.flashattention2_nopad, keys, q, [30, 9])
    assert_attended(prefill(flashattention2_nopad, keys, q, [30, 9]), expected)
    assert_attended(decode(flash_decoding, keys, q[[29, 38]]), expected[[29, 38]])


@each_native_row_of("flash_decoding")
@each_native_row_of("flashattention2_nopad")
@pytest.mark.parametrize("head_dim", [8, 40, 200])
def test_head_dims_that_no_model_of_the_sweep_has_are_served(flash_decoding, flashattention2_nopad, head_dim, device):
    keys = PagedKeys([70, 9], 1, head_dim, device)
    q = queries(20 + 9, 2, head_dim, device)
    expected = prefill(reference.flashattention2_nopad, keys, q, [20, 9])
    assert_attended(prefill(flashattention2_nopad, keys, q, [20, 9]), expected)
    assert_attended(decode(flash_decoding, keys, q[[19, 28]]), expected[[19, 28]])


# More cached tokens than any grid axis but the first can count, whatever a kernel puts there.
MANY_KEYS = 70_003


@pytest.mark.case("B4")
@each_row_of("flashattention2_nopad")
def test_prefill_reads_seventy_thousand_cached_tokens_through_a_strided_view(flashattention2_nopad, device):
    keys, q = PagedKeys([MANY_KEYS], 1, 16, device, page_size=256), queries(2, 1, 16, device)
    assert not keys.k_pool.is_contiguous()
    assert_attended(prefill(flashattention2_nopad, keys, q, [2]), prefill(reference.flashattention2_nopad, keys, q, [2]))


@pytest.mark.case("B4")
@each_row_of("flash_decoding")
def test_decode_reads_seventy_thousand_cached_tokens_through_a_strided_view(flash_decoding, device):
    keys, q = PagedKeys([MANY_KEYS], 1, 16, device, page_size=256), queries(1, 1, 16, device)
    assert_attended(decode(flash_decoding, keys, q), decode(reference.flash_decoding, keys, q))


@pytest.mark.case("B1")
@each_native_row_of("flashattention2_nopad")
def test_a_prefill_of_more_sequences_and_heads_than_an_axis_counts_is_one_axis(flashattention2_nopad, device, monkeypatch):
    if flashattention2_nopad.spec.name.startswith("gluon."):
        pytest.skip("Gluon's lanes are those of a whole warp, which looks at 32 bounds or more together")
    monkeypatch.setattr(prefill_plan(), "_SEQS", 2)
    keys = PagedKeys([150, 0, 9, 20, 0, 3, 40], 1, 64, device)
    q_lens = [140, 0, 9, 5, 0, 0, 33]
    q = queries(sum(q_lens), 2, 64, device)
    assert_attended(prefill(flashattention2_nopad, keys, q, q_lens), prefill(reference.flashattention2_nopad, keys, q, q_lens))


UNSERVED = [
    pytest.param({"page_size": lambda _: 24}, id="page-size-24"),
    pytest.param({"page_size": lambda _: 512}, id="page-size-512"),
    pytest.param({"sm_scale": lambda _: 0.0}, id="scale-0"),
    pytest.param({"sm_scale": lambda _: -0.125}, id="negative-scale"),
    pytest.param({name: lambda heads: heads.repeat(1, 1, 5) for name in ("q", "k_pool", "v_pool")}, id="head-dim-320"),
]


@each_native_row_of("flash_decoding")
@each_native_row_of("flashattention2_nopad")
@pytest.mark.parametrize("changes", UNSERVED)
def test_native_rows_refuse_what_only_the_torch_rows_serve(flash_decoding, flashattention2_nopad, changes, device):
    assert refused(flash_decoding, decode_arguments(device), changes)
    assert refused(flashattention2_nopad, prefill_arguments(device), changes)


@each_native_row_of("flashattention2_nopad")
def test_prefill_refuses_a_negative_length(flashattention2_nopad, device):
    assert refused(flashattention2_nopad, prefill_arguments(device), {"max_seqlen_q": lambda _: -1})
