"""Tools and reasoning over the wire, from a model that says what it is told to, at once and streamed."""

import json

import openai
import pytest

from tests.entrypoints.server.scripted_serve import COMMAND
from tests.entrypoints.server.serve import Server
from tests.entrypoints.server.weather import BOTH, CALLS, CITY, HALT, OSLO, STOP, TOOLS, user, weather_server
from tests.scripted_engine import say

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with weather_server(tmp_path_factory.mktemp("scripted")) as server:
        yield server


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def whole(served, said, **values):
    """Content, reasoning, calls and the reason of an answer that was sent at once."""
    answer = served.post(CHAT, messages=user(said), **values)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", [])]
    assert all(call["type"] == "function" and len(call["id"]) == 9 for call in message.get("tool_calls", []))
    return message["content"], message.get("reasoning_content"), calls, choice["finish_reason"]


def streamed(served, said, **values):
    """The same of a stream, and how many events had a part of a call."""
    content, reasoning, calls, reason, pieces = "", "", {}, None, 0
    for event in served.events(CHAT, messages=user(said), **values)[:-1]:
        [choice] = event["choices"]
        delta, reason = choice["delta"], choice["finish_reason"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        pieces += "tool_calls" in delta
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["type"] == "function"
                calls[call["index"]] = [call["function"]["name"], ""]
            calls[call["index"]][1] += call["function"]["arguments"]
    calls = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    return (content or (None if calls else ""), reasoning or None, calls, reason), pieces


CASES = {
    "call": (OSLO, {}, (None, None, CALLS[:1], "tool_calls")),
    "talk": ("It is sunny.", {}, ("It is sunny.", None, [], "stop")),
    "talk-then-call": (f"Wait. {OSLO}", {}, ("Wait.", None, CALLS[:1], "tool_calls")),
    "parallel": (BOTH, {}, (None, None, CALLS, "tool_calls")),
    "one-at-a-time": (BOTH, {"parallel_tool_calls": False}, (None, None, CALLS[:1], "tool_calls")),
    "none": (OSLO, {"tool_choice": "none"}, (OSLO, None, [], "stop")),
    "required": (BOTH, {"tool_choice": "required"}, (None, None, CALLS, "tool_calls")),
    "required-one": (BOTH, {"tool_choice": "required", "parallel_tool_calls": False}, (None, None, CALLS[:1], "tool_calls")),
    "named": (HALT, {"tool_choice": STOP}, (None, None, CALLS[1:], "tool_calls")),
    "named-though-it-would-talk": ("It is sunny.", {"tool_choice": STOP}, (None, None, CALLS[1:], "tool_calls")),
    "half-a-mark": ("a <tool_cal", {}, ("a <tool_cal", None, [], "stop")),
    "cut-off": (OSLO, {"max_tokens": 12}, ("<tool_call>\n", None, [], "length")),
}


@pytest.mark.case("I2")
@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_read_alike_at_once_and_streamed(served, name):
    said, values, expected = CASES[name]
    values = {"tools": TOOLS, "max_tokens": 300, **values}
    if name != "cut-off":
        assert whole(served, say(said), **values) == expected
        assert streamed(served, say(said), **values)[0] == expected
    else:  # blanks that lead to a call are told only where there is none
        assert whole(served, say(said), **values)[2:] == streamed(served, say(said), **values)[0][2:] == expected[2:]


def test_arguments_are_streamed_as_they_are_written(served):
    _, pieces = streamed(served, say(OSLO), tools=TOOLS)
    assert pieces > 3


@pytest.mark.parametrize(
    ("said", "values", "expected"),
    [
        (f"Hm <or> not?</think>\n\n{OSLO}", {"tools": TOOLS}, (None, "Hm <or> not?", CALLS[:1], "tool_calls")),
        (f"Hm.</think>\n\n{OSLO}", {"tools": TOOLS, "tool_choice": "required"}, (None, "Hm.", CALLS[:1], "tool_calls")),
        ("Hm.</think>\n\nSunny.", {}, ("Sunny.", "Hm.", [], "stop")),
        ('Hm.</think>\n\n{"city": "Rome"}', {"response_format": CITY}, ('{"city": "Rome"}', "Hm.", [], "stop")),
        ("Hm.</think>\n\na/b", {"grammar": {"kind": "regex", "source": "[ab]/b"}}, ("a/b", "Hm.", [], "stop")),
        ("Hm.</think>\n\n{}", {"response_format": {"type": "json_object"}}, ("{}", "Hm.", [], "stop")),
    ],
    ids=["auto", "required", "text", "schema", "regex", "object"],
)
def test_reasoning_is_told_apart_and_grammars_hold_behind_it(served, said, values, expected):
    if values.get("response_format") is CITY:
        values = {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}}
    said = "THINK " + say(said)
    assert whole(served, said, max_tokens=300, **values) == expected
    assert streamed(served, said, max_tokens=300, **values)[0] == expected


def test_reasoning_that_the_model_opens_itself_is_told_apart(served):
    assert whole(served, say("<think>Hm.</think>Sunny."), max_tokens=100) == ("Sunny.", "Hm.", [], "stop")


def test_several_answers_are_read_each_for_itself(served):
    answer = served.post(CHAT, messages=user(say(OSLO)), tools=TOOLS, n=3).json()
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
    assert len(set(ids)) == 3
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"tool_calls"}


def test_a_conversation_with_calls_and_their_results_goes_through_the_template(served, client):
    values = {"model": "tiny", "tools": TOOLS, "max_tokens": 300}
    first = client.chat.completions.create(messages=user("THINK " + say(f"Hm.</think>{OSLO}")), **values).choices[0].message
    assert first.reasoning_content == "Hm."
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": [{"type": "text", "text": say("Rain.")}]}
    turns = [*user("Weather?"), first, result]
    second = client.chat.completions.create(messages=turns, **values)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("Rain.", "stop")
    sent = [turn if isinstance(turn, dict) else turn.model_dump() for turn in turns]
    text = served.post("/detokenize", tokens=served.post("/tokenize", messages=sent).json()["tokens"]).json()["prompt"]
    written = (
        '<think>Hm.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call><|end|><|tool|>SAY[['
    )
    assert written in text


def test_arguments_that_are_no_json_go_through_the_template_as_they_are(served):
    call = {"id": "a", "type": "function", "function": {"name": "stop", "arguments": '{"a": '}}
    turns = [*user("x"), {"role": "assistant", "tool_calls": [call], "content": None}, *user("y")]
    text = served.post("/detokenize", tokens=served.post("/tokenize", messages=turns).json()["tokens"]).json()["prompt"]
    assert json.dumps('{"a": ') in text


def test_the_openai_client_puts_a_stream_of_calls_together(client):
    values = {"model": "tiny", "messages": user(say(BOTH)), "tools": TOOLS, "max_tokens": 300}
    with client.chat.completions.stream(**values) as stream:
        [choice] = stream.get_final_completion().choices
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS
    assert len({call.id for call in calls}) == 2
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("values", "param", "says"),
    [
        ({"tools": []}, "tools", "tools is empty"),
        ({"tools": "x"}, "tools", "tools cannot be used"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools", "is there twice"),
        ({"tools": [{"type": "web_search"}]}, "tools", "wanted 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "tool_choice cannot be used"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rain"}}}, "tool_choice", "got 'rain'"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls", "needs tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "contradict each other"),
        ({"tools": TOOLS, "grammar": {"kind": "regex", "source": "a"}}, "grammar", "contradict each other"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "objekt"}}}],
                "tool_choice": "required",
            },
            "tools",
            "objekt",
        ),
    ],
    ids=lambda part: str(part)[:40] if isinstance(part, dict) else "",
)
def test_what_cannot_be_served_is_refused_by_its_field(served, values, param, says):
    for is_stream in (False, True):
        answer = served.post(CHAT, messages=user("x"), stream=is_stream, **values)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert says in answer.json()["error"]["message"]


def test_the_setting_names_the_format_where_the_template_does_not(folder):
    flags = ("--no-prefix-cache", "--max-kv-tokens", "1024", "--tool-format", "llama3")
    server = Server(folder, *flags, command=COMMAND)
    try:
        call = '{"name": "stop", "parameters": {}}'
        stop = [{"type": "function", "function": {"name": "stop"}}]
        answer = server.ready().post(CHAT, messages=user(say(call)), tools=stop, max_tokens=60)
        error = answer.json()["error"]  # the format is known; that its template shows no tools is another matter
        assert (answer.status_code, error["param"]) == (400, "tools")
        assert "chat template does not know tools" in error["message"]
    finally:
        server.close()


def test_a_model_whose_format_is_not_known_refuses_tools_and_says_so(server, canary):
    answer = server.post(CHAT, messages=user("x"), tools=TOOLS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "hermes, llama3, mistral; set tool_format" in answer.json()["error"]["message"]
