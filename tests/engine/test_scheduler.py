"""Who waits for whom: decodes for at most one chunk, prompts for a share of each step, and nobody for what cannot run."""

import math
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.config import PAGE_SIZE
from rapid_llm.engine.scheduler import MIN_CHUNK, MOST_PREFILLS, SLICE
from rapid_llm.step import StepResult
from tests.engine.fake_worker import FakeWorker, Finished, continuation
from tests.engine.harness import assert_nothing_leaked, assert_pages_are_sound, collect, make_engine, request, take

CONTEXT = 64_000
DEPTHS = pytest.mark.parametrize("depth", [0, 1], ids=["in-step", "overlapped"])


class Device(FakeWorker):
    """Takes as long for each step as a device that is linear in its work, without hashing what a long prompt holds."""

    per_pair = 4e-10

    def __init__(self, config, depth=0):
        super().__init__(config, depth)
        self.seconds, self.plans = [], []

    def submit(self, plan):
        tokens = sum(chunk.length for chunk in plan.chunks)
        pairs = sum(chunk.length * (chunk.start + chunk.length / 2) for chunk in plan.prefills)
        rows = sum(chunk.start for chunk in plan.decodes)
        self.plans.append(plan)
        self.seconds.append(2e-3 + 8e-6 * tokens + self.per_pair * pairs + 2e-8 * rows)
        return Finished(StepResult(super().submit(plan).result().tokens, seconds=self.seconds[-1]))


def busy_engine(num_streams=4, budget=2048, depth=1, max_step_ms=math.inf, worker=Device, **options):
    """An engine whose streams decode, and will for long."""
    engine = make_engine(8192, 32, budget, depth, worker, context=CONTEXT, max_step_ms=max_step_ms, **options)
    for i in range(num_streams):
        engine.add(request(f"stream-{i}", [i] * 20, 1500, seed=i))
    steps_until_first_token(engine, [f"stream-{i}" for i in range(num_streams)])
    for _ in range(10):
        engine.step()
    return engine


def steps_until_first_token(engine, names, limit=5000):
    """Steps that each of ``names`` waits for its first token."""
    waits = {}
    for step in range(1, limit):
        for output in engine.step():
            if output.request_id in names:
                waits.setdefault(output.request_id, step)
        if set(waits) == set(names):
            return waits
    raise AssertionError(f"no token for {set(names) - set(waits)}")


@DEPTHS
def test_every_stream_decodes_in_every_step_while_long_prompts_are_computed(depth):
    engine = busy_engine(num_streams=6, budget=300, depth=depth)
    for i in range(3):
        engine.add(request(f"long-{i}", [i] * 5000, 5))
    before = len(engine.worker.plans)
    steps_until_first_token(engine, ["long-0", "long-1", "long-2"])
    plans = engine.worker.plans[before:]
    assert len(plans) > 40
    for plan in plans:
        assert len(plan.decodes) >= 6
        assert sum(chunk.length for chunk in plan.chunks) <= 300


def test_no_more_sequences_run_than_a_step_has_tokens():
    engine = make_engine(64, max_num_seqs=8, max_batched_tokens=3)
    for i in range(8):
        engine.add(request(str(i), [i], 20, seed=i))
    while engine.has_work:
        engine.step()
        running = engine.scheduler.running
        assert len(running) <= 3  # each of which has a token in each step
    assert len(engine.worker.step_tokens) < 3 * 21


def test_a_new_prompt_waits_for_its_tokens_and_not_for_the_streams():
    engine = busy_engine(num_streams=30, budget=62)
    engine.add(request("new", [1] * 320, 5))
    # 32 tokens a step beside 30 decodes, and one step more until its id is collected
    assert steps_until_first_token(engine, ["new"]) == {"new": 11}


def test_a_short_prompt_behind_long_ones_has_its_slice_at_once():
    engine = busy_engine()
    for i in range(3):
        engine.add(request(f"long-{i}", [i] * 20_000, 5))
    engine.step()
    engine.add(request("short", [9] * SLICE, 5))
    assert steps_until_first_token(engine, ["short"])["short"] <= 3


def test_long_prompts_share_and_the_first_keeps_half_of_each_step():
    engine = busy_engine(prefix_cache=False)
    for i in range(MOST_PREFILLS + 4):
        engine.add(request(f"long-{i}", [i] * 8000, 5))
    engine.step()
    chunks = engine.worker.plans[-1].prefills
    assert len(chunks) == MOST_PREFILLS
    assert chunks[0].length >= 1000
    assert all(chunk.length >= SLICE for chunk in chunks)
    assert sum(chunk.length for chunk in chunks) == 2048 - 4


def test_a_step_holds_many_short_prompts():
    engine = busy_engine(num_streams=1)
    for i in range(20):
        engine.add(request(f"short-{i}", [i] * 50, 5))
    engine.step()
    assert len(engine.worker.plans[-1].prefills) == 20


def test_requests_with_a_prefix_in_common_compute_it_about_once_even_when_they_come_at_once():
    engine = make_engine(8192, 64, 2048, 1, Device, context=CONTEXT)
    shared = [7] * 4096
    for i in range(64):
        engine.add(request(str(i), [*shared, *[i] * 20], 2, seed=i))
    collect(engine, {})
    computed = sum(engine.worker.step_tokens)
    alone = 64 * (4096 + 20 + 1)
    assert computed < alone / 20
    assert engine.scheduler.pages.num_cached_tokens == 63 * 4096
    assert_nothing_leaked(engine)


@pytest.mark.parametrize(("streams", "bound"), [(4, 0.015), (4, 0.008), (30, 0.004)], ids=["default", "short", "below-3x"])
def test_no_gap_is_longer_than_max_step_ms_or_three_decode_steps(streams, bound):
    engine = busy_engine(streams, max_step_ms=1000 * bound)
    quiet = engine.worker.seconds[-1]
    engine.add(request("first", [1] * 4000, 1))
    steps_until_first_token(engine, ["first"])  # from which the engine learns
    before = len(engine.worker.plans)
    engine.add(request("long", range(20_000), 5))
    steps_until_first_token(engine, ["long"])
    limit = max(bound, 3 * quiet)
    gaps = sorted(engine.worker.seconds[before:])
    assert len(gaps) > 10
    assert gaps[int(0.99 * len(gaps))] <= 1.1 * limit
    assert gaps[len(gaps) // 2] >= 0.6 * limit  # and the time is used, as far as chunks that fill their padding allow


def test_a_prompt_beside_streams_takes_no_more_than_half_as_long_again():
    def seconds_for(num_streams):
        engine = busy_engine(num_streams, max_step_ms=15)
        engine.add(request("first", [1] * 4000, 1))
        steps_until_first_token(engine, ["first"])
        before = len(engine.worker.seconds)
        engine.add(request("long", range(20_000), 1))
        steps_until_first_token(engine, ["long"])
        return sum(engine.worker.seconds[before:])

    assert seconds_for(30) <= 1.5 * seconds_for(0)


class SlowOverContexts(Device):
    """Needs longer for a few tokens at the end of a long prompt than for ten decodes."""

    per_pair = 1e-8


def test_a_device_too_slow_for_the_bound_still_comes_to_an_end():
    engine = busy_engine(max_step_ms=0.001, worker=SlowOverContexts)
    engine.add(request("first", [1] * 4000, 1))
    steps_until_first_token(engine, ["first"])
    before = len(engine.worker.plans)
    engine.add(request("long", range(12_000), 1))
    steps_until_first_token(engine, ["long"])
    chunks = [chunk.length for plan in engine.worker.plans[before:] for chunk in plan.prefills]
    assert min(chunks[:-1]) == MIN_CHUNK


class Erratic(Device):
    """Takes any time for a step, over and over."""

    times = (1.0,)

    def __init__(self, config, depth=0):
        super().__init__(config, depth)
        self.next_times = cycle(self.times)

    def submit(self, plan):
        return Finished(StepResult(super().submit(plan).result().tokens, seconds=next(self.next_times)))


@given(
    st.lists(st.floats(1e-7, 1e4), min_size=1, max_size=20),
    st.floats(1e-3, 100),
    st.lists(st.integers(2, 700), min_size=1, max_size=6),
)
@settings(deadline=None, max_examples=40)
def test_whatever_steps_take_the_first_prompt_goes_on_in_each(times, max_step_ms, prompts):
    worker = type("Worker", (Erratic,), {"times": tuple(times)})
    engine = busy_engine(2, budget=512, max_step_ms=max_step_ms, worker=worker)
    requests = [request(f"prompt-{i}", [i] * length, 1) for i, length in enumerate(prompts)]
    for one in requests:
        engine.add(one)
    while waiting := [one for one in requests if one.num_computed < one.prompt_len]:
        before, wanted = waiting[0].num_computed, min(waiting[0].num_to_compute, MIN_CHUNK // 2)
        engine.step()
        assert waiting[0].num_computed - before >= wanted


def test_without_streams_a_prompt_has_the_whole_budget():
    engine = make_engine(8192, 4, 2048, 0, Device, context=CONTEXT, max_step_ms=1)
    engine.add(request("long", range(8192), 1))
    collect(engine, {})
    assert engine.worker.step_tokens == [2048] * 4


@pytest.mark.case("I9")
def test_small_requests_behind_one_that_can_never_fit_finish():
    engine = make_engine(50, context=CONTEXT)
    with pytest.raises(Exception, match="does not fit the KV pool"):
        engine.add(request("never", [1] * 63 * PAGE_SIZE, 1))
    with pytest.raises(Exception, match="does not fit the KV pool"):
        engine.add(request("outgrows", [1] * 40, 60 * PAGE_SIZE))
    for i in range(5):
        engine.add(request(str(i), [i] * 10, 5))
    assert collect(engine, {}) == {str(i): continuation([i] * 10, 5) for i in range(5)}


def test_a_request_that_waits_for_room_is_the_next_to_have_it():
    engine = make_engine(12, context=CONTEXT)
    engine.add(request("runs", [1] * 8 * PAGE_SIZE, 3 * PAGE_SIZE))
    engine.step()
    engine.add(request("big", [2] * 10 * PAGE_SIZE, 2))
    engine.add(request("small", [3], 2))
    started = []
    while engine.has_work:
        engine.step()
        started += [one.id for one in engine.scheduler.running if one.id not in started]
    assert started == ["runs", "big", "small"]


def test_a_request_is_not_started_only_to_be_sent_away():
    engine = make_engine(8, max_num_seqs=4, prefix_cache=False)
    for i in range(4):
        engine.add(request(str(i), [i] * (2 * PAGE_SIZE), PAGE_SIZE, seed=i))
    results = collect(engine, {})
    assert len(results) == 4
    assert engine.scheduler.num_preemptions == 0


@DEPTHS
def test_a_request_preempted_while_its_newest_id_is_on_the_device_loses_nothing(depth):
    engine = make_engine(depth=depth)
    one = request("a", range(20), 30)
    engine.add(one)
    results = {}
    while engine.has_work:
        take(engine.step(), results)
        if one.slot is not None and one.num_preemptions < 12:
            engine.scheduler.preempt(one)
    assert one.num_preemptions == 12
    assert results == {"a": continuation(range(20), 30)}
    assert_nothing_leaked(engine)


def test_whoever_waits_for_the_first_to_compute_what_they_share_goes_on_when_it_fails_to():
    engine = make_engine(depth=1, max_batched_tokens=32)
    for i in range(3):
        engine.add(request(str(i), [*[7] * 100, i], 3))
    engine.step()
    engine.step()
    engine.abort("0")
    results = collect(engine, {})
    assert results == {str(i): continuation([*[7] * 100, i], 3) for i in (1, 2)}
    assert sum(engine.worker.step_tokens) < 101 + 2 * 2 * PAGE_SIZE + 32


def test_a_prompt_that_waits_for_another_leaves_its_share_to_those_behind():
    engine = busy_engine()
    for i in range(2):
        engine.add(request(f"alike-{i}", [*[7] * 20_000, i], 3))
    engine.add(request("short", [9] * 100, 3))
    engine.step()
    engine.step()
    lengths = [chunk.length for chunk in engine.worker.plans[-2].prefills]
    assert lengths == [2048 - 4 - 100, 100]


@DEPTHS
def test_a_preempted_request_goes_on_with_the_pages_that_are_still_there(depth):
    engine = make_engine(depth=depth)
    one = request("a", range(3 * PAGE_SIZE), 30)
    engine.add(one)
    for _ in range(5):
        engine.step()
    engine.scheduler.preempt(one)
    before = len(engine.worker.step_tokens)
    collect(engine, {})
    assert max(engine.worker.step_tokens[before:]) < PAGE_SIZE
    assert one.num_cached_tokens == 0  # of its prompt nothing was there when it came


def test_a_step_that_ends_after_its_request_lost_the_pages_says_nothing_of_the_new_ones():
    engine = make_engine(max_batched_tokens=64, depth=1)
    one = request("a", range(100), 3)
    engine.add(one)
    engine.step()  # 64 tokens, not collected
    engine.scheduler.preempt(one)
    for i in range(3):
        engine.add(request(str(i), [i] * 60, 3))
    engine.step()  # 32 tokens into other pages
    assert_pages_are_sound(engine)
