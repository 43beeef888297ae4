"""A step's time is learned from steps, whatever their mix was, and the largest chunk within a bound follows from it."""

import math
import random

import pytest

from rapid_llm.engine.step_time import StepLoad, StepTime
from rapid_llm.step import Chunk


def load_of(decodes=(), prefills=()):
    load = StepLoad()
    load.add_decodes([Chunk(slot, position, (), True) for slot, position in enumerate(decodes)])
    for start, count in prefills:
        load.add(start, count)
    return load


def device(load, slower=1.0):
    """Seconds on a device that is linear in all that a step has to do."""
    return slower * (2e-3 + 4e-6 * load.tokens + 3e-10 * load.pairs + 2e-8 * load.rows)


def taught(number=60, noise=0.0, slower=1.0, seed=0):
    draw, model = random.Random(seed), StepTime()
    for _ in range(number):
        decodes = [draw.randrange(4000) for _ in range(draw.randrange(1, 64))]
        prefills = [(draw.randrange(60_000), draw.randrange(64, 2000))] if draw.random() < 0.5 else []
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
    model = StepTime()
    assert model.seconds(load_of([5], [(0, 100)])) == 0
    model.observe(load_of([5] * 4), 0.003)
    assert model.tokens_within(0.015, load_of([5] * 4), 0) == math.inf


@pytest.mark.parametrize("start", [0, 1000, 64_000, 1_000_000])
@pytest.mark.parametrize("bound", [0.004, 0.015, 0.1])
def test_the_largest_chunk_fits_and_one_token_more_does_not(start, bound):
    model, load = taught(), load_of([500] * 16)
    count = model.tokens_within(bound, load, start)
    assert count >= 0
    if count > 1:
        assert model.seconds(load_of([500] * 16, [(start, count)])) <= bound * 1.001
    assert model.seconds(load_of([500] * 16, [(start, max(count, 1) + 1)])) >= bound * 0.999


def test_no_time_left_is_no_token():
    model = taught()
    assert model.tokens_within(1e-9, load_of([10] * 8), 0) == 0


def test_a_step_that_took_a_hundred_times_too_long_less_than_doubles_it_and_is_soon_forgotten():
    model, probe = taught(), load_of([1000] * 8, [(1000, 512)])
    before = model.seconds(probe)
    model.observe(probe, 100 * before)
    assert model.seconds(probe) < 2 * before
    for _ in range(20):
        model.observe(probe, device(probe))
    assert model.seconds(probe) == pytest.approx(device(probe), rel=0.2)


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
    model = StepTime()
    for _ in range(1000):
        model.observe(load_of([100] * 4, [(0, 256)]), 0.01)
    assert model.seconds(load_of([100] * 4, [(0, 256)])) == pytest.approx(0.01, rel=0.01)
    assert all(rate >= 0 for rate in model._rates())


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan], ids=["zero", "negative", "nan"])
def test_a_time_that_is_none_teaches_nothing(seconds):
    model = StepTime()
    model.observe(load_of([1], [(0, 9)]), seconds)
    assert model.seconds(load_of([1], [(0, 9)])) == 0
