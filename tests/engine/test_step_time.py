"""A step's time is learned from steps, whatever their mix was, and the largest chunk within a bound follows from it."""

import math
import random
from bisect import bisect_left

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rapid_llm.config import mixed_sizes
from rapid_llm.engine.step_time import QUERY_TILE, StepLoad, StepTime
from rapid_llm.step import Chunk

SIZES = mixed_sizes(2048)


def load_of(decodes=(), prefills=()):
    load = StepLoad()
    load.add_decodes([Chunk(slot, position, (), True) for slot, position in enumerate(decodes)])
    for start, count in prefills:
        load.add(start, count)
    return load


def device(load, slower=1.0):
    """Seconds on a device that is linear in all that a step computes."""
    tokens = SIZES[bisect_left(SIZES, load.tokens)] if load.pairs else load.tokens
    return slower * (2e-3 + 4e-6 * tokens + 3e-10 * load.pairs + 2e-8 * load.rows)


def taught(number=60, noise=0.0, slower=1.0, seed=0):
    draw, model = random.Random(seed), StepTime(SIZES)
    for _ in range(number):
        decodes = [draw.randrange(4000) for _ in range(draw.randrange(1, 64))]
        prefills = [(draw.randrange(60_000), draw.randrange(64, 1900))] if draw.random() < 0.5 else []
        load = load_of(decodes, prefills)
        model.observe(load, device(load, slower) * (1 + noise * draw.uniform(-1, 1)))
    return model


PROBES = [
    pytest.param(load_of([1000] * 8), id="decodes"),
    pytest.param(load_of([1000] * 8, [(0, 512)]), id="first-chunk"),
    pytest.param(load_of([100] * 60, [(40_000, 300)]), id="late-chunk"),
]


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.1), (0.1, 0.3)], ids=["exact", "noisy"])
def test_steps_that_were_never_seen_are_predicted(probe, noise, error):
    # the ridge that decides between like terms costs some per cent; a tenth of noise on ten steps costs the rest
    assert taught(noise=noise).seconds(probe) == pytest.approx(device(probe), rel=error)


def test_nothing_is_known_and_nothing_bounded_before_a_step_with_a_chunk_was_measured():
    model = StepTime(SIZES)
    assert model.seconds(load_of([5], [(0, 100)])) == 0
    model.observe(load_of([5] * 4), 0.003)
    assert model.tokens_within(0.015, load_of([5] * 4), 0, 2044) == 2044


@pytest.mark.parametrize("start", [0, 1000, 64_000, 1_000_000])
@pytest.mark.parametrize("bound", [0.004, 0.015, 0.1])
def test_the_largest_chunk_fits_and_one_token_more_does_not(start, bound):
    model, most = taught(200), 2032  # by when predictions are right
    count = model.tokens_within(bound, load_of([500] * 16), start, most)
    assert 0 <= count <= most
    if count > 1:
        assert device(load_of([500] * 16, [(start, count)])) <= bound
    if count < most:
        assert device(load_of([500] * 16, [(start, max(count, 1) + 1)])) >= 0.8 * bound


def test_one_token_is_a_decode_whoever_has_it():
    assert load_of([7], [(1000, 1)]) == load_of([7, 1000])


def test_no_time_left_is_no_token():
    model = taught()
    assert model.tokens_within(1e-9, load_of([10] * 8), 0, 2000) == 0


@pytest.mark.parametrize("start", [0, 8000, 60_000])
def test_a_chunk_fills_the_padding_that_it_pays_for(start):
    model, decodes, ends = taught(), 16, set()
    for bound in range(1, 100):
        count = model.tokens_within(bound / 1000, load_of([500] * decodes), start, 2048 - decodes)
        ends.add(count)
        assert count in (0, 1) or count + decodes in SIZES or count in (128, 256, 512, 1024)
    assert len(ends) > 5


def test_the_more_steps_scatter_the_more_room_is_left_for_it():
    within = [taught(200, noise).tokens_within(0.010, load_of([500] * 16), 1000, 2032) for noise in (0.0, 0.1, 0.3)]
    assert within == sorted(within, reverse=True)
    assert within[-1] < within[0]


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_steps_that_scatter_end_within_their_bound(noise):
    model, draw, late = taught(noise=noise), random.Random(1), 0
    for step in range(1000):
        load = load_of([500] * 16)
        load.add(30 * step, max(model.tokens_within(0.015, load, 30 * step, 2032), QUERY_TILE))
        seconds = device(load) * (1 + noise * draw.uniform(-1, 1))
        late += seconds > 0.015
        model.observe(load, seconds)
    assert late < 10


loads = st.builds(
    load_of,
    st.lists(st.integers(0, 100_000), max_size=20),
    st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 250)), max_size=4),
)
observations = st.lists(st.tuples(loads, st.floats(1e-6, 100)), max_size=30)


@given(observations, loads, st.tuples(*[st.floats(1e-6, 10)] * 2), st.tuples(*[st.integers(0, 10**6)] * 2), st.integers(0, 1000))
@settings(deadline=None)
def test_more_time_is_no_fewer_tokens_and_a_longer_prefix_no_more(observed, load, bounds, starts, most):
    assume(load.tokens + most <= SIZES[-1])
    model = StepTime(SIZES)
    for each, seconds in observed:
        if each.tokens:
            model.observe(each, seconds)
    short, long = sorted(bounds)
    near, far = sorted(starts)
    assert 0 <= model.tokens_within(short, load, near, most) <= model.tokens_within(long, load, near, most) <= most
    assert model.tokens_within(long, load, far, most) <= model.tokens_within(long, load, near, most)


def test_a_step_that_took_a_hundred_times_too_long_less_than_doubles_it_and_is_soon_forgotten():
    model, probe = taught(), load_of([1000] * 8, [(1000, 512)])
    before, within = model.seconds(probe), model.tokens_within(0.02, load_of([1000] * 8), 1000, 2000)
    model.observe(probe, 100 * before)
    assert model.seconds(probe) < 2 * before
    for _ in range(20):
        model.observe(probe, device(probe))
    assert model.seconds(probe) == pytest.approx(device(probe), rel=0.2)
    assert model.tokens_within(0.02, load_of([1000] * 8), 1000, 2000) >= within / 2


def test_it_follows_a_device_that_becomes_slower():
    model, probe = taught(), load_of([1000] * 8, [(1000, 512)])
    for _ in range(60):
        model.observe(probe, device(probe, slower=3.0))
    assert model.seconds(probe) == pytest.approx(device(probe, slower=3.0), rel=0.2)


def test_a_long_answer_does_not_wash_out_what_prompts_cost():
    model, probe = taught(), load_of([1000] * 8, [(30_000, 512)])
    for position in range(5000):
        load = load_of([position] * 8)
        model.observe(load, device(load))
    assert model.seconds(probe) == pytest.approx(device(probe), rel=0.2)


def test_equal_steps_alone_do_not_upset_it():
    model = StepTime(SIZES)
    for _ in range(1000):
        model.observe(load_of([100] * 4, [(0, 256)]), 0.01)
    assert model.seconds(load_of([100] * 4, [(0, 256)])) == pytest.approx(0.01, rel=0.01)
    assert all(rate >= 0 for rate in model._rates())


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan], ids=["zero", "negative", "nan"])
def test_a_time_that_is_none_teaches_nothing(seconds):
    model = StepTime(SIZES)
    model.observe(load_of([1], [(0, 9)]), seconds)
    assert model.seconds(load_of([1], [(0, 9)])) == 0
