"""The token half: whatever arrives, in whatever order and however little memory there is, each request gets its own ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.config import PAGE_SIZE
from rapid_llm.errors import RequestError
from rapid_llm.step import SampledToken, StepResult
from tests.engine.fake_worker import VOCAB, FakeWorker, Finished, continuation
from tests.engine.harness import CONTEXT, assert_nothing_leaked, assert_pages_are_sound, collect, make_engine, request, take

REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4 * PAGE_SIZE),  # prompt
        st.integers(1, 3 * PAGE_SIZE),  # new tokens
        st.frozensets(st.integers(0, VOCAB - 1), max_size=3),  # end ids
        st.integers(0, 3),  # steps before it arrives
        st.one_of(st.none(), st.integers(0, 30)),  # steps before it is aborted
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    asks=REQUESTS,
    num_pages=st.integers(8, 24),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 90),
    depth=st.integers(0, 1),
    prefix_cache=st.booleans(),
)
def test_every_request_gets_its_own_ids_and_nothing_leaks(asks, num_pages, max_num_seqs, budget, depth, prefix_cache):
    engine = make_engine(num_pages, max_num_seqs, budget, depth, prefix_cache=prefix_cache)
    results, aborts, step = {}, {}, 0

    def run_step():
        nonlocal step
        for name in [name for name, when in aborts.items() if when <= step]:
            engine.abort(name)
            del aborts[name]
        take(engine.step(), results)
        assert_pages_are_sound(engine)
        step += 1

    aborted = set()
    for number, (prompt, count, end_ids, wait, abort_after) in enumerate(asks):
        for _ in range(wait):
            run_step()
        engine.add(request(str(number), prompt, count, end_ids, seed=number))
        if abort_after is not None:
            aborts[str(number)] = step + abort_after
            aborted.add(str(number))
    while engine.has_work:
        run_step()
        assert step < 20_000

    for number, (prompt, count, end_ids, _, _) in enumerate(asks):
        ids, reason = results.get(str(number), ([], None))
        expected, expected_reason = continuation(prompt, count, end_ids, seed=number)
        if str(number) in aborted and reason is None:
            assert ids == expected[: len(ids)]
        else:
            assert (ids, reason) == (expected, expected_reason)
    assert_nothing_leaked(engine)
    assert max(engine.worker.step_tokens, default=0) <= budget


@pytest.mark.case("I14")
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("depth", [0, 1], ids=["in-step", "overlapped"])
def test_requests_that_outgrow_the_pool_get_the_same_ids(depth, prefix_cache):
    engine = make_engine(num_pages=9, max_num_seqs=6, depth=depth, prefix_cache=prefix_cache)
    requests = [request(str(i), range(i, i + 18), 70, seed=i) for i in range(8)]
    for one in requests:
        engine.add(one)
    results = collect(engine, {})
    for i, one in enumerate(requests):
        assert results[one.id] == continuation(range(i, i + 18), 70, seed=i)
    assert engine.scheduler.num_preemptions >= 6
    assert_nothing_leaked(engine)


@pytest.mark.case("I14")
@settings(max_examples=80, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4 * PAGE_SIZE), min_size=1, max_size=5),
    draw=st.randoms(use_true_random=False),
    num_pages=st.integers(7, 20),
    budget=st.integers(6, 80),
    depth=st.integers(0, 1),
    prefix_cache=st.booleans(),
)
def test_every_request_may_lose_its_pages_three_times_at_any_moment(prompts, draw, num_pages, budget, depth, prefix_cache):
    engine = make_engine(num_pages, 5, budget, depth, prefix_cache=prefix_cache)
    requests = [request(str(i), prompt, 40, seed=i) for i, prompt in enumerate(prompts)]
    for one in requests:
        engine.add(one)
    results, most = {}, draw.choice([1, 4])
    for _ in range(5000):
        take(engine.step(), results)
        assert_pages_are_sound(engine)
        todo = [one for one in engine.scheduler.running if one.num_preemptions < 3]
        for one in draw.sample(todo, min(len(todo), most)):
            engine.scheduler.preempt(one)
        if not engine.has_work:
            break
    assert min(one.num_preemptions for one in requests) >= 3
    for i, prompt in enumerate(prompts):
        assert results[str(i)] == continuation(prompt, 40, seed=i)
    assert_nothing_leaked(engine)


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_on_beside_it():
    engine = make_engine(max_batched_tokens=10)
    engine.add(request("short", [1, 2], 50))
    take(engine.step(), results := {})
    engine.add(request("long", range(60), 3))
    before = len(engine.worker.step_tokens)
    grown = len(results["short"][0])
    while "long" not in results:
        take(engine.step(), results)
    steps = len(engine.worker.step_tokens) - before
    assert steps == 7  # 60 tokens, 9 a step beside one decode
    assert len(results["short"][0]) == grown + steps


@pytest.mark.case("I9")
def test_first_come_first_served():
    engine = make_engine(num_pages=8, max_num_seqs=1)
    for name in ("a", "b", "c"):
        engine.add(request(name, [1, 2, 3], 4))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert order == ["a", "b", "c"]


@pytest.mark.case("G5")
def test_a_pool_filled_to_the_last_page_serves_everybody():
    engine = make_engine(num_pages=8, max_num_seqs=4)
    for i in range(4):
        engine.add(request(str(i), range(i, i + PAGE_SIZE), PAGE_SIZE + 1, seed=i))
    results = collect(engine, {})
    for i in range(4):
        assert results[str(i)] == continuation(range(i, i + PAGE_SIZE), PAGE_SIZE + 1, seed=i)


@pytest.mark.case("I8")
@pytest.mark.parametrize(
    ("prompt_len", "new", "words"),
    [
        (0, 1, "empty"),
        (CONTEXT, 1, "longer than the context"),
        (10 * CONTEXT, 1, "longer than the context"),
        (CONTEXT - 1, 2, "longer than the context"),
        (4 * PAGE_SIZE, PAGE_SIZE + 2, "does not fit the KV pool"),
    ],
    ids=["empty", "context", "ten-contexts", "answer-past-context", "pool"],
)
def test_what_can_never_run_is_refused_and_the_others_run(prompt_len, new, words):
    engine = make_engine(num_pages=5)
    engine.add(request("good", [1, 2, 3], 5))
    with pytest.raises(RequestError, match=words):
        engine.add(request("bad", [1] * prompt_len, new))
    assert collect(engine, {}) == {"good": continuation([1, 2, 3], 5)}


@pytest.mark.parametrize(("prompt_len", "new"), [(CONTEXT - 1, 1), (1, CONTEXT - 1)], ids=["all-prompt", "all-answer"])
def test_a_request_of_exactly_the_context_runs(prompt_len, new):
    engine = make_engine(num_pages=8)
    engine.add(request("full", [5] * prompt_len, new))
    assert collect(engine, {}) == {"full": continuation([5] * prompt_len, new)}


@pytest.mark.parametrize("depth", [0, 1], ids=["in-step", "overlapped"])
def test_no_token_is_computed_past_max_tokens(depth):
    engine = make_engine(num_pages=8, depth=depth)
    engine.add(request("full", [5], CONTEXT - 1))
    collect(engine, {})
    assert sum(engine.worker.step_tokens) == CONTEXT - 1  # the last sampled id is never fed back


def test_a_pool_one_row_short_of_the_last_id_is_enough():
    engine = make_engine(num_pages=1)
    engine.add(request("tight", [1] * PAGE_SIZE, 1))  # the sampled id itself needs no row
    assert collect(engine, {}) == {"tight": continuation([1] * PAGE_SIZE, 1)}


def test_an_id_in_use_is_refused():
    engine = make_engine()
    engine.add(request("a", [1], 2))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("a", [1], 2))


@pytest.mark.parametrize("depth", [0, 1], ids=["in-step", "overlapped"])
def test_aborting_twice_or_too_late_is_no_error(depth):
    engine = make_engine(depth=depth)
    engine.add(request("a", [1], 5))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("never")
    assert collect(engine, {}) == {}
    assert_nothing_leaked(engine)


class NaNWorker(FakeWorker):
    """Finds no number in the logits of slot 0 in its third step."""

    def submit(self, plan):
        result = super().submit(plan).result()
        if len(self.step_tokens) == 3 and 0 in result.tokens:
            result = StepResult({**result.tokens, 0: SampledToken(-1)})
        return Finished(result)


@pytest.mark.case("H4")
@pytest.mark.parametrize("depth", [0, 1], ids=["in-step", "overlapped"])
def test_logits_without_a_number_end_that_request_alone(depth):
    engine = make_engine(depth=depth, worker=NaNWorker)
    engine.add(request("hurt", [1, 2], 10))
    engine.add(request("other", [3, 4], 10, seed=1))
    results = collect(engine, {})
    assert results["hurt"] == (continuation([1, 2], 2)[0], "error")
    assert results["other"] == continuation([3, 4], 10, seed=1)
    assert_nothing_leaked(engine)


@pytest.mark.case("H4")
@pytest.mark.parametrize("depth", [0, 1], ids=["in-step", "overlapped"])
def test_pages_of_a_request_that_ended_without_a_number_are_not_found_again(depth):
    engine = make_engine(depth=depth, worker=NaNWorker, max_batched_tokens=32)
    prompt = [5] * 60  # two chunks, then the step without a number: pages of the first chunk could be found by then
    engine.add(request("hurt", prompt, 10))
    assert collect(engine, {})["hurt"][1] == "error"
    assert engine.scheduler.pages.cache.num_pages == 0
    again = request("again", prompt, 10)
    engine.add(again)
    assert collect(engine, {}) == {"again": continuation(prompt, 10)}
    assert again.num_cached_tokens == 0


@pytest.mark.case("H4")
def test_pages_that_a_request_lost_before_its_logits_held_no_number_are_not_found_either():
    engine = make_engine(depth=1, worker=NaNWorker)
    hurt = request("hurt", [5] * 40, 10)
    engine.add(hurt)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.pages.cache.num_pages == 2
    engine.scheduler.preempt(hurt)  # while the third step is on its way
    [output] = engine.step()
    assert output.finish_reason == "error"
    assert engine.scheduler.pages.cache.num_pages == 0
    assert_nothing_leaked(engine)


class LostWorker(FakeWorker):
    """Fails to bring the result of its first step."""

    def submit(self, plan):
        step = super().submit(plan)
        return self if len(self.step_tokens) == 1 else step

    def result(self):
        raise RuntimeError("the device is lost")


def test_pages_of_a_step_that_brought_no_result_are_not_found():
    engine = make_engine(worker=LostWorker)
    engine.add(request("a", [1] * 40, 3))
    with pytest.raises(RuntimeError, match="lost"):
        engine.step()
    assert engine.scheduler.pages.cache.num_pages == 0


@pytest.mark.case("I15")
@pytest.mark.parametrize("length", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE])
@pytest.mark.parametrize("depth", [0, 1], ids=["in-step", "overlapped"])
def test_a_prompt_sent_again_and_one_longer_is_answered_as_before(length, depth):
    engine = make_engine(depth=depth)
    prompt = list(range(length))
    found = []
    for name, ids in (("first", prompt), ("again", prompt), ("longer", [*prompt, 90])):
        one = request(name, ids, 5)
        engine.add(one)
        assert collect(engine, {}) == {name: continuation(ids, 5)}
        found.append(one.num_cached_tokens)
    # whole pages, and the last token is always computed
    assert found == [0, (length - 1) // PAGE_SIZE * PAGE_SIZE, length // PAGE_SIZE * PAGE_SIZE]
    assert_nothing_leaked(engine)


@pytest.mark.case("I15")
@pytest.mark.parametrize("depth", [0, 1], ids=["in-step", "overlapped"])
def test_the_next_turn_of_a_conversation_finds_the_answer_of_the_last(depth):
    engine = make_engine(depth=depth)
    history, cached = [], []
    for turn in range(3):
        one = request(str(turn), [*history, *range(turn, turn + 10)], 2 * PAGE_SIZE - 10)
        engine.add(one)
        ids, _ = collect(engine, {})[one.id]
        assert ids == continuation(one.token_ids[: one.prompt_len], 2 * PAGE_SIZE - 10)[0]
        history = list(one.token_ids)
        cached.append(one.num_cached_tokens)
    # the last id of an answer was never computed, so its page is not full
    assert cached == [0, PAGE_SIZE, 3 * PAGE_SIZE]


def test_requests_that_run_at_the_same_time_share_their_prompt():
    engine = make_engine(num_pages=12, max_num_seqs=4)
    prompt = [7] * (4 * PAGE_SIZE)
    engine.add(request("first", prompt, 20))
    take(engine.step(), results := {})
    for i in range(3):
        engine.add(request(str(i), [*prompt, i], 14, seed=i))  # each alone would need 5 pages of the 12
    take(engine.step(), results)
    assert len(engine.scheduler.running) == 4
    collect(engine, results)
    assert results["first"] == continuation(prompt, 20)
    for i in range(3):
        assert results[str(i)] == continuation([*prompt, i], 14, seed=i)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=5), st.lists(st.integers(0, 3), min_size=1, max_size=20)),
        min_size=2,
        max_size=10,
    ),
    num_pages=st.integers(8, 30),
    budget=st.integers(5, 200),
    depth=st.integers(0, 1),
    waits=st.integers(0, 3),
)
def test_prompts_that_begin_alike_get_the_ids_they_get_alone(prompts, num_pages, budget, depth, waits):
    engine = make_engine(num_pages, 4, budget, depth)
    results = {}
    for i, (pages, tail) in enumerate(prompts):
        ids = [page for page in pages for _ in range(PAGE_SIZE)] + tail
        engine.add(request(str(i), ids, 12))
        for _ in range(waits):
            take(engine.step(), results)
            assert_pages_are_sound(engine)
    collect(engine, results)
    for i, (pages, tail) in enumerate(prompts):
        ids = [page for page in pages for _ in range(PAGE_SIZE)] + tail
        assert results[str(i)] == continuation(ids, 12)
    assert_nothing_leaked(engine)


def test_one_who_comes_behind_a_prompt_in_flight_and_waits_for_its_pages_is_set_up_all_the_same():
    engine, results = make_engine(depth=1), {}
    prompt = list(range(32))
    engine.add(request("first", prompt, 1))
    take(engine.step(), results)
    engine.add(request("second", prompt, 3))  # nothing runs in the next step: its pages are still being computed
    collect(engine, results)
    assert results == {"first": continuation(prompt, 1), "second": continuation(prompt, 3)}
    assert_nothing_leaked(engine)
