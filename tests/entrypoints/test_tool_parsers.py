"""Calls and reasoning in an answer's text: the same however the text is cut, and what is no call comes out as content."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid_llm.entrypoints.tools.events import CallArguments, CallStart, Content, Reasoning, joined
from rapid_llm.entrypoints.tools.hermes import HermesParser
from rapid_llm.entrypoints.tools.llama3 import Llama3Parser
from rapid_llm.entrypoints.tools.mistral import MistralParser
from rapid_llm.entrypoints.tools.reasoning import ReasoningParser

NAMES = frozenset(("f", "get_weather", "a-b.c"))
PARSERS = {
    "hermes": HermesParser,
    "mistral": MistralParser,
    "llama3": lambda: Llama3Parser(NAMES),
    "reasoning": ReasoningParser,
    "reasoning-hermes": lambda: ReasoningParser(HermesParser()),
    "reasoning-inside": lambda: ReasoningParser(MistralParser(), inside=True),
}
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>")
PARTS = ('"name": "f"', '"arguments": {', '"parameters": {}', "{}", "true", *'<[]{}" ,;:fx1é\\\n')
WHOLE = (
    '{"name": "f", "arguments": {"a": [1, "}"]}}',
    '{"name": "f", "parameters": {"b": "<"}}',
    '{"name": "unknown", "parameters": {}}',
)
PIECES = st.sampled_from(MARKS + PARTS + WHOLE)
TEXTS = st.lists(PIECES, max_size=14).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=5), JSON, max_size=3)), min_size=1, max_size=3
)


def cut(text, places):
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def parse(parser, pieces):
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.finish())


def content_of(events):
    return "".join(event.text for event in events if isinstance(event, Content))


def calls_of(events):
    """Name and arguments of each call, in the order of their indices."""
    calls = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    return [tuple(call) for call in calls]


@pytest.mark.case("I2")
@pytest.mark.parametrize("kind", PARSERS)
@given(text=TEXTS, places=st.lists(st.integers(0, 10_000), max_size=12))
def test_the_cuts_of_a_text_change_nothing(kind, text, places):
    assert parse(PARSERS[kind](), cut(text, places)) == parse(PARSERS[kind](), [text]) == parse(PARSERS[kind](), list(text))


@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama3"])
@given(text=TEXTS)
def test_a_text_without_a_call_comes_out_as_it_is(kind, text):
    events = parse(PARSERS[kind](), [text])
    if not calls_of(events):
        assert content_of(events) == text


@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama3"])
@given(text=TEXTS)
def test_no_word_is_lost_whatever_becomes_of_the_calls_around_it(kind, text):
    events = parse(PARSERS[kind](), [text])
    told = content_of(events) + "".join(name + arguments for name, arguments in calls_of(events))
    assert told.count("x") == text.count("x")


@given(text=TEXTS)
def test_a_text_without_reasoning_comes_out_as_it_is(text):
    events = parse(ReasoningParser(), [text])
    if not text.lstrip().startswith("<think>"):
        assert events == ([Content(text)] if text else [])


def hermes_text(calls, pad):
    return f"{pad}".join(f"<tool_call>{pad}{as_object(call, 'arguments')}{pad}</tool_call>" for call in calls)


def as_object(call, key):
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


WRITERS = {
    "hermes": hermes_text,
    "mistral": lambda calls, pad: (
        "[TOOL_CALLS]" + pad + "[" + f",{pad}".join(as_object(call, "arguments") for call in calls) + "]"
    ),
    "mistral-named": lambda calls, pad: pad.join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values)}" for name, values in calls),
    "llama3": lambda calls, pad: f"{pad};{pad}".join(as_object(call, "parameters") for call in calls),
    "llama3-tag": lambda calls, pad: pad.join("<|python_tag|>" + as_object(call, "parameters") for call in calls),
}


@pytest.mark.parametrize("kind", WRITERS)
@given(calls=CALLS, pad=st.sampled_from(["", " ", "\n"]), places=st.lists(st.integers(0, 10_000), max_size=12))
def test_calls_are_read_as_they_were_written(kind, calls, pad, places):
    events = parse(PARSERS[kind.split("-")[0]](), cut(WRITERS[kind](calls, pad), places))
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(events)] == calls
    assert content_of(events) == ""


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", 'So:\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n', "So:", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1} so}</tool_call>', " so}</tool_call>", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
        ("hermes", '<tool_call>{"nome": "f"}</tool_call> or', '<tool_call>{"nome": "f"}</tool_call> or', []),
        ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}', "<tool_call>", [("f", "{}")]),
        ("hermes", "1 <tool_cal", "1 <tool_cal", []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} oops </tool_call>', " oops </tool_call>", [("f", "{}")]),
        ("mistral", 'ok[TOOL_CALLS][{"name": "f", "arguments": {}}, no', "ok, no", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": 1} bye', " bye", [("f", '{"a": 1}')]),
        ("mistral", "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
        ("llama3", '{"name": "Ann", "parameters": {"a": 1}}', '{"name": "Ann", "parameters": {"a": 1}}', []),
        ("llama3", '{"name": "f", "parameters": {}} and', " and", [("f", "{}")]),
        ("llama3", 'I call {"name": "f", "parameters": {}}', 'I call {"name": "f", "parameters": {}}', []),
        ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ],
)
def test_texts_that_models_write(kind, text, content, calls):
    events = parse(PARSERS[kind](), list(text))
    assert (content_of(events), calls_of(events)) == (content, calls)


def test_a_call_streams_its_name_first_and_then_its_arguments_as_they_come():
    parser = HermesParser()
    assert parser.feed('Hi <tool_call>{"name": "get_weather"') == [Content("Hi")]
    assert parser.feed(', "arguments": {"city": "Par') == [CallStart(0, "get_weather"), CallArguments(0, '{"city": "Par')]
    assert parser.feed('is"}') == [CallArguments(0, 'is"}')]
    assert parser.feed("}</tool") == []
    assert parser.finish() == [Content("</tool")]


def test_content_waits_for_no_more_than_what_may_be_a_marker():
    parser = HermesParser()
    assert parser.feed("2 < 3 and <tool") == [Content("2 < 3 and")]
    assert parser.feed("box>") == [Content(" <toolbox>")]


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm </th ok\n</think>\n\nThe <think> answer", False, "hm </th ok", "The <think> answer"),
        ("hm\n</think>\n\nYes", True, "hm", "Yes"),
        ("\n<think>never ends", False, "never ends", ""),
        ("no marks </think>", False, "", "no marks </think>"),
        ("<thi", False, "", "<thi"),
        ("<think></think>", False, "", ""),
    ],
)
def test_reasoning_is_told_apart(text, inside, reasoning, content):
    events = parse(ReasoningParser(inside=inside), list(text))
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == reasoning
    assert content_of(events) == content


def test_markers_in_the_reasoning_are_no_calls():
    parser = ReasoningParser(HermesParser(), inside=True)
    events = parse(parser, ['I might <tool_call>\n</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'])
    assert events == [Reasoning("I might <tool_call>"), CallStart(0, "f"), CallArguments(0, "{}")]
