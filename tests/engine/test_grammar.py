"""Requests with a grammar in the token half: they take part when their mask is there, and nobody waits for them."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.config import Grammar
from rapid_llm.engine import engine as engine_module
from rapid_llm.engine.grammar import Allowed, Constraint, Grammars, Vocabulary
from rapid_llm.engine.request import Request, TokenRules
from rapid_llm.errors import RequestError
from rapid_llm.step import NO_WAY_ON, SampledToken, StepResult
from tests.engine.fake_worker import FakeWorker, Finished, continuation, next_id
from tests.engine.harness import assert_nothing_leaked, assert_pages_are_sound, collect, make_engine, request, take

END = 96
NUMBER = Grammar("regex", "any number")


class Gated:
    """Grammars whose jobs are done when the test says so: each allows the multiples of a number that the token before gives."""

    def __init__(self):
        self.constraints, self.waits = [], []

    def follow(self, grammar, *, may_end):
        self.constraints.append(GatedConstraint(grammar))
        return self.constraints[-1]

    def await_news(self, seconds):
        self.waits.append(seconds)


class GatedConstraint:
    def __init__(self, grammar):
        self.grammar, self.is_compiled, self.answer, self.taken = grammar, False, None, []

    @property
    def is_ready(self):
        return self.answer is not None

    def take(self, token_id):
        self.taken.append(token_id)

    def open(self, answer):
        self.answer = answer

    def poll(self):
        answer, self.answer = self.answer, None
        if isinstance(answer, RequestError):
            raise answer
        self.is_compiled = self.is_compiled or answer is not None
        return answer


class MaskedWorker(FakeWorker):
    """Takes the first allowed id from the one on that it would have sampled."""

    def submit(self, plan):
        masks = {chunk.slot: chunk.mask for chunk in plan.chunks if chunk.mask}
        assert all(chunk.samples for chunk in plan.chunks if chunk.mask)
        result = super().submit(plan).result()
        tokens = {slot: SampledToken(first_allowed(token.token_id, masks.get(slot))) for slot, token in result.tokens.items()}
        self.last_ids.update({slot: token.token_id for slot, token in tokens.items()})
        return Finished(StepResult(tokens))


def first_allowed(token, mask):
    return (
        token if mask is None else next(one % 97 for one in range(token, token + 97) if mask[one % 97 // 8] >> one % 97 % 8 & 1)
    )


def mask_of(ids):
    return sum(1 << token for token in ids).to_bytes(16, "little")


def with_grammar(name, prompt, count, **values):
    return Request(name, list(prompt), TokenRules(count, frozenset((END,)), grammar=NUMBER, **values))


def gated_engine(**values):
    engine = make_engine(worker=MaskedWorker, **values)
    engine.grammars = Gated()
    return engine


@pytest.mark.parametrize("depth", [0, 1])
def test_others_run_on_while_a_grammar_is_compiled_and_while_a_mask_is_not_there(depth):
    engine, results = gated_engine(depth=depth), {}
    engine.add(with_grammar("slow", [1, 2], 3))
    engine.add(request("quick", [3, 4], 12))
    for _ in range(4 + depth):
        take(engine.step(), results)
    assert len(results["quick"][0]) == 4
    assert engine.num_waiting == 1
    assert "slow" not in results
    [constraint] = engine.grammars.constraints
    constraint.open(Allowed(mask_of([40])))
    for _ in range(3 + depth):
        take(engine.step(), results)
    assert results["slow"][0] == [40]
    assert len(results["quick"][0]) == 7 + depth
    assert constraint.taken == [40]
    constraint.open(Allowed(is_complete=True))
    collect(engine, results)
    assert results["slow"] == ([40], "stop")
    assert results["quick"] == continuation([3, 4], 12)
    assert_nothing_leaked(engine)


def test_nobody_waits_for_a_compilation_and_only_a_moment_for_a_mask():
    engine, results = gated_engine(), {}
    engine.add(with_grammar("slow", [1, 2], 3))
    take(engine.step(), results)
    assert engine.grammars.waits == [engine_module._IDLE_SECONDS]  # nothing else to do
    engine.add(request("quick", [3, 4], 12))
    take(engine.step(), results)
    assert len(engine.grammars.waits) == 1
    engine.grammars.constraints[0].open(Allowed(mask_of([40])))
    take(engine.step(), results)
    engine.grammars.waits.clear()
    take(engine.step(), results)
    assert engine.grammars.waits
    assert max(engine.grammars.waits) <= engine_module._MASK_SECONDS


def test_a_grammar_that_cannot_be_used_is_told_once_and_leaves_nothing():
    engine, results = gated_engine(), {}
    engine.add(with_grammar("bad", [1], 3))
    engine.add(request("good", [3, 4], 5))
    engine.grammars.constraints[0].open(RequestError("grammar: no", change="correct it"))
    collect(engine, results)
    assert [(name, str(error)) for name, error in engine.refused.items()] == [("bad", "grammar: no; correct it.")]
    assert results == {"good": continuation([3, 4], 5)}
    assert_nothing_leaked(engine)


def test_a_grammar_that_cannot_go_on_ends_its_request_and_what_was_computed_is_found_again():
    engine, results = gated_engine(), {}
    prompt = list(range(40))
    engine.add(with_grammar("stuck", prompt, 9))
    engine.grammars.constraints[0].open(Allowed(mask_of([7])))
    take(engine.step(), results)
    engine.grammars.constraints[0].open(Allowed(problem="too complex"))
    [output] = engine.step()
    assert (output.finish_reason, output.failure) == ("error", NO_WAY_ON)
    engine.add(request("next", prompt, 1))
    [output] = engine.step()
    assert output.num_cached_tokens == 32
    assert_nothing_leaked(engine)


@pytest.mark.parametrize("runs", [False, True])
def test_a_request_may_be_aborted_whatever_its_grammar_is_at(runs):
    engine = gated_engine()
    engine.add(with_grammar("gone", [1, 2], 9))
    if runs:
        engine.grammars.constraints[0].open(Allowed(mask_of([7])))
        engine.step()
    engine.abort("gone")
    assert not engine.has_work
    engine.grammars.constraints[0].open(Allowed(mask_of([7])))
    assert engine.step() == []
    assert_nothing_leaked(engine)


def test_an_engine_without_grammars_refuses_them():
    engine = make_engine()
    with pytest.raises(RequestError, match="serves no grammars"):
        engine.add(with_grammar("x", [1], 3))
    assert not engine.has_work


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_masks_that_come_late_change_no_token_in_small_pools(data):
    """Requests with and without a grammar, masks in any order, preemptions: everybody's ids are those that come alone."""
    pages = data.draw(st.integers(5, 9))
    engine = gated_engine(num_pages=pages, max_num_seqs=3, depth=data.draw(st.integers(0, 1)), max_batched_tokens=32)
    expected, results, follows = {}, {}, {}
    for number in range(data.draw(st.integers(1, 5))):
        prompt = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=30))
        count, name = data.draw(st.integers(1, 30)), f"r{number}"
        if data.draw(st.booleans()):
            expected[name] = multiples(prompt, count)
            engine.add(with_grammar(name, prompt, count))
            follows[name] = engine.grammars.constraints[-1]
        else:
            expected[name] = continuation(prompt, count)
            engine.add(request(name, prompt, count))
    for _ in range(3000):
        if not engine.has_work:
            break
        for constraint in follows.values():
            if constraint.answer is None and data.draw(st.booleans()):
                factor = 2 + (constraint.taken[-1] if constraint.taken else 0) % 5
                if not constraint.is_compiled or len(constraint.taken) > getattr(constraint, "told", 0):
                    constraint.told = len(constraint.taken)
                    constraint.open(Allowed(mask_of(range(0, 96, factor))))
        take(engine.step(), results)
        assert_pages_are_sound(engine)
    assert results == expected
    assert_nothing_leaked(engine)


def multiples(prompt, count):
    ids, factor = list(prompt), 2
    for _ in range(count):
        token = first_allowed(next_id(ids), mask_of(range(0, 96, factor)))
        ids.append(token)
        factor = 2 + token % 5
    return ids[len(prompt) :], "length"


def bytes_vocabulary(specials=(256, 257), ends=(257,)):
    tokens = [bytes([byte]) for byte in range(256)] + [b"<s>", b"</s>", b"ab", b""]
    return Vocabulary(tokens, frozenset(specials), frozenset(ends), lambda text: list(text.encode()))


def follow(grammar, may_end=True, vocabulary=bytes_vocabulary):
    grammars = Grammars(vocabulary)
    grammars.check(grammar)
    return grammars, grammars.follow(grammar, may_end=may_end)


def told(grammars, constraint):
    while (allowed := constraint.poll()) is None:
        grammars.await_news(1.0)
    return allowed


def ids_of(allowed):
    assert len(allowed.mask) % 4 == 0
    return {token for token in range(8 * len(allowed.mask)) if allowed.mask[token // 8] >> token % 8 & 1}


def test_a_mask_holds_the_tokens_that_go_on_and_the_end_where_it_may_be():
    grammars, constraint = follow(Grammar("regex", "a(b|</s>)*"))
    assert ids_of(told(grammars, constraint)) == {ord("a"), 258}
    constraint.take(258)
    # The end's own text may be written, byte by byte; the token is the end.
    assert ids_of(told(grammars, constraint)) == {ord("b"), ord("<"), 257}
    constraint.take(ord("<"))
    assert ids_of(told(grammars, constraint)) == {ord("/")}


def test_a_grammar_may_name_the_end_of_text_itself():
    grammars, constraint = follow(Grammar("lark", 'start: "a" </s>'))
    told(grammars, constraint)
    constraint.take(ord("a"))
    assert ids_of(told(grammars, constraint)) == {257}


def test_without_an_end_of_text_to_sample_only_what_must_end_ends():
    grammars, constraint = follow(Grammar("regex", "ab?"), may_end=False)
    constraint_ids = ids_of(told(grammars, constraint))
    assert constraint_ids == {ord("a"), 258}
    constraint.take(ord("a"))
    assert ids_of(told(grammars, constraint)) == {ord("b")}
    constraint.take(ord("b"))
    assert told(grammars, constraint) == Allowed(is_complete=True)


def test_a_vocabulary_without_an_end_of_text_is_followed_too():
    grammars, constraint = follow(Grammar("regex", "a?"), vocabulary=lambda: bytes_vocabulary(ends=()))
    assert ids_of(told(grammars, constraint)) == {ord("a")}


def test_two_answers_under_one_grammar_go_their_own_ways():
    grammars, first = follow(Grammar("regex", "a1|b2"))
    second = grammars.follow(Grammar("regex", "a1|b2"), may_end=True)
    for constraint, start, rest in ((first, "a", "1"), (second, "b", "2")):
        told(grammars, constraint)
        constraint.take(ord(start))
        assert ids_of(told(grammars, constraint)) == {ord(rest)}


def test_a_compilation_that_hangs_is_given_up_by_its_request(monkeypatch):
    gate = threading.Event()
    grammars = Grammars(lambda: gate.wait(60) and bytes_vocabulary())
    constraint = Constraint(grammars, NUMBER, may_end=True)
    assert constraint.poll() is None
    constraint._deadline = 0.0
    with pytest.raises(RequestError, match="takes too long to compile: got more than 5 s"):
        constraint.poll()
    gate.set()
