import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.engine.stop import StopChecker
from rapid_llm.errors import RequestError

pytestmark = pytest.mark.case("I2")


def stream(stops, pieces):
    """What was shown piece by piece, the rest at the end, and the stop string."""
    checker = StopChecker(stops)
    shown, matched = [], None
    for piece in pieces:
        text, matched = checker.push(piece)
        shown.append(text)
        if matched is not None:
            break
    return shown, checker.finish(), matched


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "rest", "matched"),
    [
        pytest.param(["STOP"], ["a", "STOP", "b"], ["a", ""], "", "STOP", id="one-piece"),
        pytest.param(["STOP"], ["aS", "TO", "Pb"], ["a", "", ""], "", "STOP", id="three-pieces"),
        pytest.param(["DEFGHIJ"], ["ABCDEF", "G", "HI", "J", "K"], ["ABC", "", "", ""], "", "DEFGHIJ", id="five-pieces"),
        pytest.param(["STOP"], ["aSTOPb"], ["a"], "", "STOP", id="inside-a-piece"),
        pytest.param(["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "", "aab", id="overlapping-itself"),
        pytest.param(["abcd"], ["ab", "x", "abc", "d"], ["", "abx", "", ""], "", "abcd", id="near-miss-then-match"),
        pytest.param(["abcd"], ["abc"], [""], "abc", None, id="near-miss-at-the-end"),
        pytest.param(["abcd"], ["xab", "cy"], ["x", "abcy"], "", None, id="near-miss-goes-on"),
        pytest.param(["ab", "abc"], ["abc"], [""], "", "ab", id="prefix-of-another"),
        pytest.param(["abcd", "bc"], ["abcd"], ["a"], "", "bc", id="inside-another"),
        pytest.param(["xbc", "bc"], ["axbc"], ["a"], "", "xbc", id="end-of-another"),
        pytest.param(["one", "two", "three", "four"], ["a thr", "ee b"], ["a ", ""], "", "three", id="list-of-four"),
        pytest.param(["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "", "\n\n", id="newlines"),
        pytest.param(["終わり", "🎉"], ["や終", "わ", "り"], ["や", "", ""], "", "終わり", id="unicode"),
        pytest.param(["🎉"], ["hi ", "🎉"], ["hi ", ""], "", "🎉", id="emoji"),
        pytest.param([], ["a", "b"], ["a", "b"], "", None, id="no-stop-strings"),
        pytest.param(["STOP"], ["", "a", ""], ["", "a", ""], "", None, id="empty-pieces"),
    ],
)
def test_text_is_held_back_only_while_it_may_become_a_stop(stops, pieces, shown, rest, matched):
    assert stream(stops, pieces) == (shown, rest, matched)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="a stop string is empty"):
        StopChecker(["a", ""])


def test_nothing_comes_after_a_match():
    checker = StopChecker(["x"])
    assert checker.push("axb") == ("a", "x")
    assert checker.push("more") == ("", "x")
    assert checker.finish() == ""


def expected_cut(text, stops):
    """By definition: the stop that is complete first; of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def may_become_a_stop(text, stops):
    """Length of the longest end of ``text`` that a stop begins with."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


words = st.text("ab🎉", min_size=1, max_size=6)


@given(pieces=st.lists(st.text("ab🎉", max_size=4), max_size=12), stops=st.lists(words, max_size=4))
@settings(deadline=None, max_examples=500)
def test_however_text_is_cut_the_stream_is_the_cut_text_and_never_late(pieces, stops):
    whole = "".join(pieces)
    checker, shown, seen = StopChecker(stops), "", ""
    for piece in pieces:
        text, matched = checker.push(piece)
        shown, seen = shown + text, seen + piece
        if matched is not None:
            break
        assert len(shown) == len(seen) - may_become_a_stop(seen, stops)
    assert (shown + checker.finish(), checker.matched) == expected_cut(whole, stops)


def test_a_long_stop_string_costs_no_more_per_character_than_a_short_one():
    steps = 0
    checker = StopChecker(["a" * 5000 + "b"])
    automaton = checker._automata[0]
    follow = automaton._next

    def counted(state, character):
        nonlocal steps
        steps += 1
        return follow(state, character)

    automaton._next = counted
    for _ in range(20):
        checker.push("a" * 1000)
    assert steps == 20_000
    assert checker.finish() == "a" * 5000
