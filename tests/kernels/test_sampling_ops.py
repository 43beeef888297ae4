"""sample, top_logprobs, adjust_logits and mask_logits against their float64 twins, on every row that this machine runs."""

import dataclasses
import math
import os

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.ops.fallback import sampling as fallback
from rapid_llm.kernels.ops.interfaces import Limit
from tests import reference
from tests.kernels.rows_under_test import DTYPES, Row, broken_cases, each_row_of, to

VOCABULARIES = [pytest.param(size, id=f"vocab-{size}") for size in (257, 8193, 10_000, 151_936)]
INT64_MIN = -(1 << 63)


def per_row(values, count, dtype, device):
    values = list(values) if isinstance(values, (list, tuple, range)) else [values] * count
    return torch.tensor(values, dtype=dtype, device=device)


def rules(count, device, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=0, positions=0):
    """Arguments of sample besides the logits; a scalar stands for all rows."""
    return {
        "temperature": per_row(temperature, count, torch.float32, device),
        "top_k": per_row(top_k, count, torch.int32, device),
        "top_p": per_row(top_p, count, torch.float32, device),
        "min_p": per_row(min_p, count, torch.float32, device),
        "seeds": per_row(seeds, count, torch.int64, device),
        "positions": per_row(positions, count, torch.int32, device),
    }


def ids_of(sample, logits, **kwargs):
    """Sampled ids as a list; the output starts as a value that is no id."""
    out_ids = torch.full((logits.shape[0],), -77, dtype=torch.int32, device=logits.device)
    assert sample(logits, **rules(logits.shape[0], logits.device, **kwargs), out_ids=out_ids) is out_ids
    return out_ids.tolist()


def expected_ids(logits, **kwargs):
    return reference.sample(logits, **rules(logits.shape[0], logits.device, **kwargs)).tolist()


def is_interpreted(row):
    return "triton" in row.spec.requires.packages and os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()


def draws(row, count):
    """``count``, or a tenth where the row is interpreted and takes some 50 ms a draw. Noise is fixed, so no draw is luck."""
    return count // 10 if is_interpreted(row) else count


def broken_cases_of(row, device):
    """The whole sweep; in the interpreter, where it takes four minutes, wide vocabularies in bf16 only."""
    if not is_interpreted(row):
        return broken_cases(row, device)
    in_bf16 = Row(dataclasses.replace(row.spec, dtypes=("bfloat16",)))
    others = tuple(dtype for dtype in row.spec.dtypes if dtype != "bfloat16")
    narrow = Row(dataclasses.replace(row.spec, dtypes=others, limits={"vocab_size": Limit(1, 1025)}))
    return broken_cases(in_bf16, device) + broken_cases(narrow, device)


@each_row_of("sample")
def test_sample_holds_over_its_whole_sweep(sample, device):
    assert broken_cases_of(sample, device) == []


@each_row_of("top_logprobs")
def test_top_logprobs_holds_over_its_whole_sweep(top_logprobs, device):
    assert broken_cases_of(top_logprobs, device) == []


PHILOX_KNOWN_ANSWERS = [  # published with Random123
    pytest.param([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], id="zeros"),
    pytest.param([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD], id="ones"),
    pytest.param(
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        id="pi",
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX_KNOWN_ANSWERS)
def test_philox_gives_its_published_answers(counter, key, words, device):
    fast = fallback.philox(
        tuple(torch.tensor([word], device=device) for word in counter), tuple(torch.tensor([word], device=device) for word in key)
    )
    assert [int(word) for word in fast] == words
    assert reference.philox4x32(torch.tensor(counter)[:, None], *key).flatten().tolist() == words


@each_row_of("sample")
@pytest.mark.parametrize("dtype", DTYPES)
def test_temperature_zero_takes_the_lowest_id_among_the_largest(sample, dtype, device):
    logits = torch.randn(3, 1025, device=device).to(dtype)
    logits[0, [1024, 900, 77]] = 9.0
    logits[1, 0] = 9.0
    logits[2] = 4.0
    assert ids_of(sample, logits, temperature=0.0) == [77, 0, 0]


@pytest.mark.case("H1")
@each_row_of("sample")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3])
def test_a_tiny_temperature_equals_argmax(sample, temperature, dtype, device):
    logits = (10 * torch.randn(16, 1000, device=device)).clamp(-60, 50).to(dtype)
    logits[torch.arange(16), torch.arange(16) * 61] = 60.0
    logits[:, 999] = -math.inf
    assert ids_of(sample, logits, temperature=temperature, seeds=range(16)) == [row * 61 for row in range(16)]


@pytest.mark.case("H2")
@each_row_of("sample")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [257, 8193])
def test_every_top_k_lives_in_one_batch(sample, vocab_size, dtype, device):
    top_k = [-1, 0, 1, 64, vocab_size, vocab_size + 1, 10**7, 5000]
    logits = torch.randn(8, vocab_size, device=device).to(dtype)
    sampled = ids_of(sample, logits, top_k=top_k, seeds=range(8), positions=range(8))
    assert sampled == expected_ids(logits, top_k=top_k, seeds=range(8), positions=range(8))
    assert sampled[2] == int(logits[2].argmax())


@pytest.mark.case("H2")
@each_row_of("sample")
@pytest.mark.parametrize("off", [-1, 0, 257, 258, 10**7, -(1 << 31)], ids=str)
def test_top_k_is_off_at_zero_below_and_from_the_vocabulary_size_on(sample, off, device):
    count = draws(sample, 64)
    logits = torch.randn(1, 257, device=device).expand(count, 257)
    assert ids_of(sample, logits, top_k=off, positions=range(count)) == ids_of(sample, logits, positions=range(count))


@each_row_of("sample")
def test_top_k_keeps_the_lowest_ids_of_equal_logits(sample, device):
    count = draws(sample, 400)
    logits = torch.zeros(count, 37, device=device)
    logits[:, 5] = -1.0
    assert set(ids_of(sample, logits, top_k=6, positions=range(count))) == {0, 1, 2, 3, 4, 6}


@pytest.mark.case("H2")
@each_row_of("sample")
def test_a_row_keeps_its_own_top_k_next_to_a_wider_one(sample, device):
    count = draws(sample, 400)
    logits = torch.zeros(count, 100, device=device)
    sampled = ids_of(sample, logits, top_k=[2, 64] * (count // 2), positions=range(count))
    assert set(sampled[::2]) == {0, 1}
    assert count // 8 < len(set(sampled[1::2])) <= 64
    assert max(sampled) < 64


TOP_P_KEEPS = [
    pytest.param(0.0, {2}, id="0"),
    pytest.param(1e-6, {2}, id="tiny"),
    pytest.param(0.45, {2}, id="inside-the-first"),
    pytest.param(0.55, {2, 1}, id="inside-the-second"),
    pytest.param(0.8, {2, 1, 0}, id="first-of-two-equals"),
    pytest.param(0.9, {2, 1, 0, 3}, id="both-equals"),
    pytest.param(1.0, {2, 1, 0, 3}, id="off"),
]


@each_row_of("sample")
@pytest.mark.parametrize(("top_p", "kept"), TOP_P_KEEPS)
def test_top_p_keeps_the_shortest_prefix_that_reaches_it(sample, top_p, kept, device):
    count = draws(sample, 200)
    logits = torch.tensor([0.125, 0.25, 0.5, 0.125], device=device).log().expand(count, 4)
    assert set(ids_of(sample, logits, top_p=top_p, positions=range(count))) == kept


@each_row_of("sample")
def test_top_p_counts_the_mass_of_what_top_k_left(sample, device):
    count = draws(sample, 200)
    logits = torch.tensor([0.2, 0.4, 0.2, 0.2], device=device).log().expand(count, 4)
    assert set(ids_of(sample, logits, top_k=2, top_p=0.6, positions=range(count))) == {1}
    assert set(ids_of(sample, logits, top_p=0.55, positions=range(count))) == {1, 0}
    mixed = ids_of(sample, logits, top_k=[2, 3] * (count // 2), top_p=[0.6, 0.9] * (count // 2), positions=range(count))
    assert set(mixed[::2]) == {1}
    assert set(mixed[1::2]) == {1, 0, 2}


@each_row_of("sample")
def test_top_p_of_a_large_top_k_counts_no_mass_behind_it(sample, device):
    """Ten tokens of mass 1, the rest of 1e-3: 15 in the first 5,010, 30 in all. 0.3 of 15 takes five tokens, 0.3 of 30 nine."""
    logits = torch.full((1, 20_010), math.log(1e-3), device=device)
    logits[0, :10] = 0.0
    count = draws(sample, 100)
    sampled = ids_of(sample, logits.expand(count, 20_010), top_k=5010, top_p=0.29, positions=range(count))
    assert set(sampled) == {0, 1, 2, 3, 4}


@each_row_of("sample")
def test_min_p_drops_what_is_less_likely_than_its_share_of_the_likeliest(sample, device):
    count = draws(sample, 160)
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], device=device).log().expand(count, 4)
    for min_p, kept in ((0.0, {0, 1, 2, 3}), (0.3, {0, 1, 2}), (0.6, {0, 1}), (1.0, {0})):
        assert set(ids_of(sample, logits, min_p=min_p, positions=range(count))) == kept, min_p
        assert set(ids_of(sample, logits, min_p=min_p, top_k=4, top_p=0.999, positions=range(count))) == kept, min_p


@each_row_of("sample")
def test_a_nucleus_wider_than_the_first_look_is_found_in_full(sample, device):
    logits = torch.randn(6, 20_001, device=device) / 100  # nearly flat: half of the mass takes thousands of tokens
    kwargs = {"top_p": [0.5, 0.01, 0.9, 0.999, 0.2, 0.05], "positions": range(6), "seeds": range(6)}
    assert ids_of(sample, logits, **kwargs) == expected_ids(logits, **kwargs)
    kwargs["top_k"] = [0, 3, 4097, 12_000, 4096, 20_000]
    assert ids_of(sample, logits, **kwargs) == expected_ids(logits, **kwargs)


@pytest.mark.case("G12")
@each_row_of("sample")
@pytest.mark.parametrize("padding", [0.0, 5.0], ids=["zeros-behind", "fives-behind"])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_no_id_past_the_vocabulary_wins_when_all_logits_are_negative(sample, vocab_size, padding, device):
    padded = torch.full((6, vocab_size + 63), padding, device=device)
    logits = padded[:, :vocab_size]
    logits.copy_(-30 - torch.rand(6, vocab_size, device=device))
    sampled = ids_of(
        sample,
        logits,
        temperature=[0, 1, 1, 1, 1, 9],
        top_k=[0, 0, 5, 0, 0, 0],
        top_p=[1, 1, 1, 0.9, 1, 1],
        min_p=[0, 0, 0, 0, 0.9, 0],
    )
    assert all(0 <= token < vocab_size for token in sampled)
    assert sampled[0] == int(logits[0].argmax())


@pytest.mark.case("X6")
@each_row_of("sample")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
def test_a_broken_row_gives_minus_one_and_leaves_its_neighbours_alone(sample, temperature, dtype, device):
    logits = torch.randn(7, 1001, device=device).to(dtype)
    kwargs = {
        "temperature": temperature,
        "top_k": [0, 0, 50, 0, 50, 0, 0],
        "top_p": [1, 0.9, 1, 1, 0.9, 0.9, 1],
        "seeds": range(7),
    }
    quiet = ids_of(sample, logits, **kwargs)
    logits[0, 500] = math.nan
    logits[2, 1000] = math.nan
    logits[4] = -math.inf
    logits[5] = math.nan
    assert ids_of(sample, logits, **kwargs) == [-1, quiet[1], -1, quiet[3], -1, -1, quiet[6]]


@pytest.mark.case("X6")
@each_row_of("sample")
@pytest.mark.parametrize("kwargs", [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_plus_inf_wins_and_shares_with_its_equals_only(sample, kwargs, device):
    count = draws(sample, 100)
    logits = torch.randn(count, 50, device=device)
    logits[:, [7, 33]] = math.inf
    logits[:, 8] = -math.inf
    expected = {7} if kwargs.get("temperature") == 0.0 else {7, 33}
    assert set(ids_of(sample, logits, positions=range(count), **kwargs)) == expected


@each_row_of("sample")
@pytest.mark.parametrize("kwargs", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.02}], ids=str)
def test_a_banned_token_is_never_drawn(sample, kwargs, device):
    count = draws(sample, 300)
    logits = torch.full((count, 33), -math.inf, device=device)
    logits[:, 4], logits[:, 32] = 0.0, -0.5
    assert set(ids_of(sample, logits, positions=range(count), **kwargs)) == {4, 32}


@each_row_of("sample")
@pytest.mark.parametrize("kwargs", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_seed_and_position_decide_whatever_the_row_and_the_batch(sample, kwargs, device):
    row = torch.randn(1, 5003, device=device)
    alone = ids_of(sample, row, seeds=12345, positions=678, **kwargs)[0]
    for batch, place in ((2, 1), (7, 3), (33, 32)):
        logits = 3 * torch.randn(batch, 5003, device=device)
        logits[place] = row
        seeds, positions = list(range(batch)), [9] * batch
        seeds[place], positions[place] = 12345, 678
        assert ids_of(sample, logits, seeds=seeds, positions=positions, **kwargs)[place] == alone


@each_row_of("sample")
def test_seeds_use_all_64_bits_and_positions_count(sample, device):
    logits = torch.zeros(1, 100_003, device=device).expand(7, 100_003)
    seeds = [0, 1, 1 << 32, -1, INT64_MIN, (1 << 63) - 1, 0]
    sampled = ids_of(sample, logits, seeds=seeds, positions=[0] * 6 + [1])
    assert len(set(sampled)) == 7
    assert sampled == expected_ids(logits, seeds=seeds, positions=[0] * 6 + [1])


DISTRIBUTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.6}, id="cold"),
    pytest.param({"temperature": 1.8}, id="hot"),
    pytest.param({"top_k": 9}, id="top-k"),
    pytest.param({"top_p": 0.8}, id="top-p"),
    pytest.param({"min_p": 0.1}, id="min-p"),
    pytest.param({"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.03}, id="all"),
]


@each_row_of("sample")
@pytest.mark.parametrize("kwargs", DISTRIBUTIONS)
@pytest.mark.parametrize("varied", ["positions", "seeds"])
def test_draws_follow_the_filtered_distribution(sample, kwargs, varied, device):
    count, vocab_size = 20_000, 37
    row = 1.5 * torch.randn(vocab_size, device=device)
    if is_interpreted(sample):  # too slow to count: draw by draw it must be the twin
        rules_of_rows = {**kwargs, varied: range(1000, 1020)}
        logits = row.expand(20, vocab_size)
        assert ids_of(sample, logits, **rules_of_rows) == expected_ids(logits, **rules_of_rows)
        return
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **kwargs}
    temperature = torch.tensor(filters.pop("temperature", 1.0))
    expected = count * reference.filtered_probabilities(row.cpu(), temperature, **filters)

    sampled = ids_of(sample, row.expand(count, vocab_size), **kwargs, **{varied: range(count)})

    counts = torch.bincount(torch.tensor(sampled), minlength=vocab_size).double()
    kept = expected > 0
    assert (counts[~kept] == 0).all()
    chi_square = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)  # five standard deviations above its mean


@each_row_of("sample")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_a_wider_buffer_off_by_one_element_are_read_as_they_stand(sample, dtype, device):
    storage = torch.full((1 + 5 * 1100,), math.nan, dtype=dtype, device=device)
    logits = storage[1:].view(5, 1100)[:, :1025]
    logits.copy_(torch.randn(5, 1025, device=device))
    kwargs = {"temperature": [0, 1, 1, 1, 0.5], "top_k": [0, 0, 30, 0, 0], "top_p": [1, 1, 1, 0.7, 1], "seeds": range(5)}
    assert ids_of(sample, logits, **kwargs) == expected_ids(logits, **kwargs)


def test_the_fallback_samples_alike_however_it_cuts_the_batch(device, monkeypatch):
    logits = torch.randn(9, 515, device=device)
    kwargs = {"top_k": [0, 7, 0] * 3, "top_p": [1, 1, 0.8] * 3, "seeds": range(9)}
    whole = ids_of(fallback.sample, logits, **kwargs)
    monkeypatch.setattr(fallback, "_CHUNK_ELEMENTS", 1)
    assert ids_of(fallback.sample, logits, **kwargs) == whole == expected_ids(logits, **kwargs)


@pytest.mark.case("G13")
@each_row_of("sample")
@each_row_of("top_logprobs")
def test_sampling_of_no_rows_is_empty(sample, top_logprobs, device):
    none = torch.empty(0, 257, device=device)
    ids = torch.empty(0, dtype=torch.int32, device=device)
    assert ids_of(sample, none) == []
    out = torch.empty(0, 3, dtype=torch.int32, device=device)
    assert top_logprobs(none, ids, out_ids=out, out_logprobs=torch.empty(0, 3, device=device)).shape == (0, 3)


@each_row_of("sample")
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"logits": torch.zeros(3, 20)[:, ::2]}, id="every-other-logit"),
        pytest.param({"logits": torch.zeros(10, 3).t()}, id="transposed"),
        pytest.param({"logits": torch.zeros(3, 0)}, id="no-vocabulary"),
        pytest.param({"logits": torch.zeros(3, 10).double()}, id="float64-logits"),
        pytest.param({"seeds": torch.zeros(3, dtype=torch.int32)}, id="int32-seeds"),
        pytest.param({"top_k": torch.zeros(3, dtype=torch.int64)}, id="int64-top-k"),
        pytest.param({"temperature": torch.zeros(6)[::2]}, id="strided-temperature"),
        pytest.param({"min_p": torch.zeros(2)}, id="a-row-short"),
    ],
)
def test_sample_refuses_what_it_would_misread(sample, wrong, device):
    arguments = {"logits": torch.zeros(3, 10), **rules(3, "cpu"), **wrong}
    out_ids = torch.full((3,), -77, dtype=torch.int32, device=device)
    with pytest.raises(KernelInputError, match=r"sample\(logits \["):
        sample(**{name: to(device, value) for name, value in arguments.items()}, out_ids=out_ids)
    assert out_ids.tolist() == [-77] * 3


def logprobs_of(top_logprobs, logits, tokens, n):
    token_ids = torch.tensor(tokens, dtype=torch.int32, device=logits.device)
    ids = torch.full((len(tokens), n + 4), -77, dtype=torch.int32, device=logits.device)
    logprobs = torch.full((len(tokens), n + 4), 7.0, device=logits.device)
    out_ids, out_logprobs = ids[:, : n + 1], logprobs[:, : n + 1]
    assert top_logprobs(logits, token_ids, out_ids=out_ids, out_logprobs=out_logprobs) is out_logprobs
    assert (ids[:, n + 1 :] == -77).all()
    assert (logprobs[:, n + 1 :] == 7.0).all()
    return out_ids, out_logprobs


@each_row_of("top_logprobs")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 5, 20, 1025], ids=lambda n: f"top-{n}")
def test_top_logprobs_equal_the_twin(top_logprobs, n, dtype, device):
    tokens = [1024] if n > 20 and is_interpreted(top_logprobs) else [1024, 0, 512]  # a column takes some milliseconds there
    logits = (4 * torch.randn(len(tokens), 1025, device=device)).to(dtype)
    ids, logprobs = logprobs_of(top_logprobs, logits, tokens, n)
    expected_ids, expected = reference.top_logprobs(logits, torch.tensor(tokens), n=n)
    assert ids.tolist() == expected_ids.tolist()
    # a log of 1,025 fp32 terms and a difference of numbers up to 30
    torch.testing.assert_close(logprobs.double().cpu(), expected, rtol=1e-6, atol=5e-6)


@each_row_of("top_logprobs")
def test_equal_logprobs_stand_by_ascending_id(top_logprobs, device):
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, -3.0, 0.0]], device=device)
    ids, _ = logprobs_of(top_logprobs, logits, [4], 5)
    assert ids.tolist() == [[4, 1, 3, 0, 2, 5]]


@pytest.mark.case("X6")
@each_row_of("top_logprobs")
def test_an_undefined_logprob_is_minus_one_and_nan_and_leaves_its_neighbours_alone(top_logprobs, device):
    logits = torch.randn(5, 64, device=device)
    quiet_ids, quiet = logprobs_of(top_logprobs, logits, [3, 3, 3, -1, 3], 2)
    quiet_ids, quiet = quiet_ids.clone(), quiet.clone()
    logits[0, 9], logits[1] = math.nan, -math.inf
    ids, logprobs = logprobs_of(top_logprobs, logits, [3, 3, 3, -1, 3], 2)
    assert ids[:2].tolist() == [[-1] * 3] * 2
    assert logprobs[:2].isnan().all()
    assert ids[3, 0] == -1
    assert logprobs[3, 0].isnan()
    assert torch.equal(ids[2:], quiet_ids[2:])
    assert torch.equal(logprobs[2:].nan_to_num(), quiet[2:].nan_to_num())
    assert not logprobs[3, 1:].isnan().any()


@pytest.mark.case("G12")
@each_row_of("top_logprobs")
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_padding_behind_the_vocabulary_takes_no_part_in_logprobs(top_logprobs, vocab_size, device):
    padded = torch.full((2, vocab_size + 63), 5.0, device=device)
    logits = padded[:, :vocab_size]
    logits.copy_(-30 - torch.rand(2, vocab_size, device=device))
    ids, logprobs = logprobs_of(top_logprobs, logits, [0, vocab_size - 1], 20)
    assert int(ids.max()) < vocab_size
    assert (logprobs[:, 1:].exp().sum(dim=1) <= 1).all()
    assert (logprobs < -math.log(vocab_size) + 1).all()


@pytest.mark.case("H2")
@each_row_of("top_logprobs")
@pytest.mark.parametrize(
    ("logits", "columns"),
    [
        pytest.param(torch.zeros(2, 10), 12, id="more-than-the-vocabulary"),
        pytest.param(torch.zeros(2, 20)[:, ::2], 3, id="every-other-logit"),
        pytest.param(torch.zeros(3, 10), 3, id="tokens"),
    ],
)
def test_top_logprobs_refuses_what_it_cannot_fill(top_logprobs, logits, columns, device):
    out_ids = torch.full((2, columns), -77, dtype=torch.int32, device=device)
    out_logprobs = torch.zeros(2, columns, device=device)
    with pytest.raises(KernelInputError, match=r"top_logprobs\(logits \["):
        top_logprobs(
            to(device, logits), torch.zeros(2, dtype=torch.int32, device=device), out_ids=out_ids, out_logprobs=out_logprobs
        )
    assert (out_ids == -77).all()


def adjustments(num_seqs, vocab_size, device, **changes):
    """Arguments of adjust_logits besides the logits: nothing to adjust but what ``changes`` say."""
    nothing = {
        "counts": torch.zeros(0, vocab_size, dtype=torch.int32),
        "count_rows": torch.full((num_seqs,), -1, dtype=torch.int32),
        "repetition": torch.ones(num_seqs),
        "presence": torch.zeros(num_seqs),
        "frequency": torch.zeros(num_seqs),
        "edit_rows": torch.zeros(0, dtype=torch.int32),
        "edit_ids": torch.zeros(0, dtype=torch.int32),
        "edit_values": torch.zeros(0),
    }
    return {name: to(device, values) for name, values in {**nothing, **changes}.items()}


def edits_of(entries):
    rows, ids, values = zip(*entries, strict=True)
    as_ids = {"edit_rows": torch.tensor(rows, dtype=torch.int32), "edit_ids": torch.tensor(ids, dtype=torch.int32)}
    return {**as_ids, "edit_values": torch.tensor(values)}


def adjusted(adjust_logits, logits, **changes):
    """The result, whose buffer is wider than it: nothing beside it may change."""
    buffer = torch.full((logits.shape[0], logits.shape[1] + 9), 7.0, device=logits.device)
    out = buffer[:, : logits.shape[1]]
    assert adjust_logits(logits, **adjustments(*logits.shape, logits.device, **changes), out=out) is out
    assert (buffer[:, logits.shape[1] :] == 7.0).all()
    return out


IN_PROMPT = 1 << 30


@each_row_of("adjust_logits")
def test_adjust_logits_holds_over_its_whole_sweep(adjust_logits, device):
    assert broken_cases_of(adjust_logits, device) == []


@each_row_of("adjust_logits")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_adjustments_are_copied_bit_by_bit_whatever_their_neighbours_ask_for(adjust_logits, dtype, device):
    logits = (4 * torch.randn(4, 2049, device=device)).to(dtype)
    counts = torch.full((2, 2049), 3, dtype=torch.int32)
    changes = {
        "counts": counts,
        "count_rows": torch.tensor([-1, 1, -1, -1], dtype=torch.int32),
        "repetition": torch.tensor([9.0, 2.0, 9.0, 9.0]),
        "presence": torch.full((4,), 9.0),
        "frequency": torch.full((4,), 9.0),
        **edits_of([(3, 2048, -math.inf)]),
    }
    out = adjusted(adjust_logits, logits, **changes)
    assert torch.equal(out[[0, 2]], logits[[0, 2]].float())
    assert torch.equal(out[3, :2048], logits[3, :2048].float())
    assert out[3, 2048] == -math.inf
    assert not torch.equal(out[1], logits[1].float())


@each_row_of("adjust_logits")
def test_penalties_are_those_of_their_definitions(adjust_logits, device):
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0, 0.0]], device=device)
    counts = torch.tensor([[0, 0, IN_PROMPT, IN_PROMPT + 1, 3, 1]], dtype=torch.int32)
    values = {"repetition": torch.tensor([2.0]), "presence": torch.tensor([0.5]), "frequency": torch.tensor([0.25])}
    out = adjusted(adjust_logits, logits, counts=counts, count_rows=torch.zeros(1, dtype=torch.int32), **values)
    # untouched, untouched, only in the prompt, in both, put out thrice, put out once
    assert out.tolist() == [[2.0, -2.0, 1.0, -4.0 - 0.75, 1.0 - 1.25, -0.75]]


@pytest.mark.case("H5")
@each_row_of("adjust_logits")
def test_a_token_may_be_raised_and_banned_at_once_and_a_ban_wins(adjust_logits, device):
    logits = torch.zeros(2, 2049, device=device)
    entries = [(1, 7, 100.0), (1, 7, -math.inf), (1, 7, -math.inf), (0, 2048, -2.5), (1, 2048, 100.0)]
    out = adjusted(adjust_logits, logits, **edits_of(entries))
    assert out[1, 7] == -math.inf
    assert (out[0, 2048], out[1, 2048]) == (-2.5, 100.0)
    assert int((out != 0).sum()) == 3


@pytest.mark.case("H4")
@each_row_of("adjust_logits")
def test_a_nan_stays_one_under_penalties_and_bans(adjust_logits, device):
    logits = torch.zeros(2, 300, device=device)
    logits[:, 7] = math.nan
    changes = {
        "counts": torch.ones(1, 300, dtype=torch.int32),
        "count_rows": torch.tensor([0, -1], dtype=torch.int32),
        "repetition": torch.full((2,), 2.0),
        **edits_of([(0, 7, -math.inf), (1, 7, -math.inf)]),
    }
    assert adjusted(adjust_logits, logits, **changes)[:, 7].isnan().all()


@pytest.mark.case("G13")
@each_row_of("adjust_logits")
def test_adjusting_no_rows_writes_nothing(adjust_logits, device):
    assert adjusted(adjust_logits, torch.empty(0, 257, device=device)).shape == (0, 257)


@each_row_of("adjust_logits")
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"logits": torch.zeros(3, 20)[:, ::2]}, id="every-other-logit"),
        pytest.param({"logits": torch.zeros(3, 10).double()}, id="float64-logits"),
        pytest.param({"counts": torch.zeros(2, 9, dtype=torch.int32)}, id="a-column-short"),
        pytest.param({"counts": torch.zeros(2, 10, dtype=torch.int64)}, id="int64-counts"),
        pytest.param({"count_rows": torch.zeros(2, dtype=torch.int32)}, id="a-row-short"),
        pytest.param({"presence": torch.zeros(6)[::2]}, id="strided-penalty"),
        pytest.param({"edit_ids": torch.zeros(2, dtype=torch.int32)}, id="edits-of-two-lengths"),
        pytest.param({"edit_values": torch.zeros(0).double()}, id="float64-edits"),
        pytest.param({"out": torch.zeros(3, 10, dtype=torch.bfloat16)}, id="bf16-result"),
    ],
)
def test_adjust_logits_refuses_what_it_would_misread(adjust_logits, wrong, device):
    out = torch.full((3, 10), 7.0, device=device)
    given = {name: to(device, value) for name, value in wrong.items()}
    arguments = {"logits": torch.zeros(3, 10, device=device), **adjustments(3, 10, device), "out": out, **given}
    with pytest.raises(KernelInputError, match=r"adjust_logits\(logits \["):
        adjust_logits(**arguments)
    assert (out == 7.0).all()


def masks_of(*allowed, vocab_size):
    """[len(allowed), words] int32: a bit for each id that is allowed."""
    masks = torch.zeros(len(allowed), -(-vocab_size // 32), dtype=torch.int64)
    for row, ids in enumerate(allowed):
        for token in ids:
            masks[row, token // 32] |= 1 << token % 32
    return masks.int()


def masked(mask_logits, logits, masks, rows):
    """The result, whose buffer is wider than it: nothing beside it may change."""
    buffer = torch.full((logits.shape[0], logits.shape[1] + 9), 7.0, device=logits.device)
    out = buffer[:, : logits.shape[1]]
    rows = torch.tensor(rows, dtype=torch.int32, device=logits.device)
    assert mask_logits(logits, to(logits.device, masks), rows, out=out) is out
    assert (buffer[:, logits.shape[1] :] == 7.0).all()
    return out


@each_row_of("mask_logits")
def test_mask_logits_holds_over_its_whole_sweep(mask_logits, device):
    assert broken_cases_of(mask_logits, device) == []


@each_row_of("mask_logits")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_mask_are_copied_and_others_keep_what_is_allowed(mask_logits, dtype, device):
    logits = (4 * torch.randn(4, 2049, device=device)).to(dtype)
    allowed = ([0, 31, 32, 2047, 2048], [])
    out = masked(mask_logits, logits, masks_of(*allowed, vocab_size=2049), [-1, 0, 1, 0])
    assert torch.equal(out[0], logits[0].float())
    assert (out[2] == -math.inf).all()
    for row in (1, 3):
        assert torch.equal(out[row, allowed[0]], logits[row, allowed[0]].float())
        assert (out[row] > -math.inf).nonzero().flatten().tolist() == allowed[0]


@pytest.mark.case("H4")
@each_row_of("mask_logits")
def test_a_nan_stays_one_whether_its_token_is_allowed_or_not(mask_logits, device):
    logits = torch.zeros(2, 300, device=device)
    logits[:, 7] = math.nan
    out = masked(mask_logits, logits, masks_of([7], [9], vocab_size=300), [0, 1])
    assert out[:, 7].isnan().all()
    assert int(out.isnan().sum()) == 2


@pytest.mark.case("G13")
@each_row_of("mask_logits")
def test_masking_no_rows_writes_nothing(mask_logits, device):
    masks = torch.zeros(0, 9, dtype=torch.int32)
    assert masked(mask_logits, torch.empty(0, 257, device=device), masks, []).shape == (0, 257)


@each_row_of("mask_logits")
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"logits": torch.zeros(3, 80)[:, ::2]}, id="every-other-logit"),
        pytest.param({"logits": torch.zeros(3, 40).double()}, id="float64-logits"),
        pytest.param({"masks": torch.zeros(2, 1, dtype=torch.int32)}, id="a-word-short"),
        pytest.param({"masks": torch.zeros(2, 2, dtype=torch.int64)}, id="int64-masks"),
        pytest.param({"mask_rows": torch.zeros(2, dtype=torch.int32)}, id="a-row-short"),
        pytest.param({"mask_rows": torch.zeros(6, dtype=torch.int32)[::2]}, id="strided-rows"),
        pytest.param({"out": torch.zeros(3, 40, dtype=torch.bfloat16)}, id="bf16-result"),
    ],
)
def test_mask_logits_refuses_what_it_would_misread(mask_logits, wrong, device):
    out = torch.full((3, 40), 7.0, device=device)
    arguments = {
        "logits": torch.zeros(3, 40, device=device),
        "masks": torch.zeros(2, 2, dtype=torch.int32, device=device),
        "mask_rows": torch.zeros(3, dtype=torch.int32, device=device),
        "out": out,
        **{name: to(device, value) for name, value in wrong.items()},
    }
    with pytest.raises(KernelInputError, match=r"mask_logits\(logits \["):
        mask_logits(**arguments)
    assert (out == 7.0).all()
