"""Every token of a prompt but the first is scored once and in order, whatever the budget, the pool and the company."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.config import PAGE_SIZE, PROMPT_LOGIT_ROWS, ResolvedConfig
from rapid_llm.engine.engine import Engine
from rapid_llm.engine.request import Request, TokenRules
from rapid_llm.step import NO_NUMBER, SampledToken, StepResult
from tests.engine.fake_worker import VOCAB, FakeWorker, Finished, continuation

CONTEXT = 32 * PAGE_SIZE


class ScoringWorker(FakeWorker):
    """Tells the successor of each token it was asked about from its pool, and counts the rows of logits."""

    broken_at = None

    def submit(self, plan):
        result = super().submit(plan).result()
        scored, rows = {}, 0
        for chunk in plan.chunks:
            first = chunk.start + chunk.length - chunk.samples - len(chunk.targets)
            assert not chunk.targets or chunk.start <= first
            entries = []
            for place, target in enumerate(chunk.targets, start=first):
                own = self.pool[self.row(chunk.slot, place)]
                entries.append(SampledToken(target, (-1 if place == self.broken_at else target,), (float(own),)))
            if entries:
                scored[chunk.slot] = tuple(entries)
            rows += len(entries)
        assert rows <= PROMPT_LOGIT_ROWS + self.config.max_num_seqs
        return Finished(StepResult(result.tokens, scored))


def run(engine, requests):
    """Ids, scored tokens and reason of each request."""
    results = {request.id: ([], [], []) for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(20_000):
        if not engine.has_work:
            return results
        for output in engine.step():
            ids, scored, reasons = results[output.request_id]
            assert not reasons
            ids += [output.token.token_id] if output.token else []
            scored += output.prompt
            reasons += [output.finish_reason] if output.finish_reason else []
    raise AssertionError("the engine does not come to an end")


def make_engine(num_pages, max_num_seqs, budget, depth):
    config = ResolvedConfig(CONTEXT, max_num_seqs, budget, num_pages)
    return Engine(config, ScoringWorker(config, depth))


ASKS = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24 * PAGE_SIZE), st.integers(1, 40), st.booleans()),
    min_size=1,
    max_size=5,
)


@settings(max_examples=80, deadline=None)
@given(asks=ASKS, num_pages=st.integers(27, 60), seqs=st.integers(1, 4), budget=st.integers(1, 400), depth=st.integers(0, 1))
def test_a_prompt_is_scored_once_and_its_answer_is_what_it_would_be(asks, num_pages, seqs, budget, depth):
    engine = make_engine(num_pages, seqs, budget, depth)
    requests = [
        Request(str(number), list(prompt), TokenRules(count, prompt_logprobs=0 if scores else -1))
        for number, (prompt, count, scores) in enumerate(asks)
    ]
    results = run(engine, requests)
    for number, (prompt, count, scores) in enumerate(asks):
        ids, scored, _ = results[str(number)]
        assert ids == continuation(prompt, count)[0]
        assert [token.token_id for token in scored] == (prompt[1:] if scores else [])
        assert [token.logprobs[0] for token in scored] == (prompt[:-1] if scores else [])
    assert engine.scheduler.allocator.num_free == num_pages


def test_a_long_prompt_that_is_scored_holds_nobody_up():
    engine = make_engine(60, 4, 400, 0)
    long = [Request(str(i), [i] * 400, TokenRules(1, prompt_logprobs=0)) for i in range(2)]
    short = Request("short", [1, 2, 3], TokenRules(1))
    steps = []
    for request in (*long, short):
        engine.add(request)
    while engine.has_work:
        steps.append([output.request_id for output in engine.step() if output.finish_reason])
    assert steps[0] == ["short"]


def test_damaged_logits_of_a_prompt_end_the_request():
    engine = make_engine(60, 4, 400, 0)
    engine.worker.broken_at = 5
    hurt, other = Request("hurt", [1] * 9, TokenRules(4, prompt_logprobs=0)), Request("other", [2] * 9, TokenRules(4))
    outputs = []
    for request in (hurt, other):
        engine.add(request)
    while engine.has_work:
        outputs += engine.step()
    [last] = [output for output in outputs if output.request_id == "hurt"]
    assert (last.token, last.finish_reason, last.failure, last.prompt) == (None, "error", NO_NUMBER, ())
    assert [output.token.token_id for output in outputs if output.request_id == "other"] == continuation([2] * 9, 4)[0]
    assert engine.scheduler.allocator.num_free == 60
