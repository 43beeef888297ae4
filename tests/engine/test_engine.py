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
@pytest.mark.parametrize("depth", [0, 1], ids=["in-step", "overlapped"])
def test_preempted_requests_get_the_same_ids(depth):
    engine = make_engine(num_pages=7, max_num_seqs=4, depth=depth)
    requests = [request(str(i), range(i, i + 20), 60, seed=i) for i in range(4)]
    for one in requests:
        engine.add(one)
    results = collect(engine, {})
    for i, one in enumerate(requests):
        assert results[one.id] == continuation(range(i, i + 20), 60, seed=i)
    assert sum(one.num_preemptions for one in requests) >= 3
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
