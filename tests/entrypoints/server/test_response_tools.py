"""Functions and reasoning in /v1/responses, with the openai client, from a model that says what it is told to."""

import json

import openai
import pydantic
import pytest

from tests.entrypoints.server.weather import BOTH, CALLS, OSLO, TOOLS, user, weather_server
from tests.scripted_engine import say

FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
THINK = "THINK "
ASK = {"model": "tiny", "max_output_tokens": 300}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with weather_server(tmp_path_factory.mktemp("scripted")) as server:
        yield server


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def told(item):
    """An item as it is whenever the same is said."""
    match item.type:
        case "reasoning":
            return "reasoning", "".join(part.text for part in item.content), item.status
        case "function_call":
            return item.name, json.loads(item.arguments), item.status
        case _:
            return "message", "".join(part.text for part in item.content), item.status


DONE = "completed"
CASES = {
    "calls": (BOTH, {}, [(name, arguments, DONE) for name, arguments in CALLS]),
    "talk": ("It is sunny.", {}, [("message", "It is sunny.", DONE)]),
    "talk-then-call": (f"Wait. {OSLO}", {}, [("message", "Wait.", DONE), (*CALLS[0], DONE)]),
    "one-at-a-time": (BOTH, {"parallel_tool_calls": False}, [(*CALLS[0], DONE)]),
    "none": (OSLO, {"tool_choice": "none"}, [("message", OSLO, DONE)]),
    "required": ("It is sunny.", {"tool_choice": {"type": "function", "name": "stop"}}, [(*CALLS[1], DONE)]),
    "nothing": ("", {}, [("message", "", DONE)]),
    "thought": (f"{THINK}Hm.</think>\n\n{OSLO}", {}, [("reasoning", "Hm.", DONE), (*CALLS[0], DONE)]),
    "thought-and-words": (f"{THINK}Hm.</think>Yes.", {}, [("reasoning", "Hm.", DONE), ("message", "Yes.", DONE)]),
    "cut-off": (f"{THINK}Hm, hm, hm, hm.", {"max_output_tokens": 4}, [("reasoning", "Hm,", "incomplete")]),
}


@pytest.mark.case("H10")
@pytest.mark.case("I2")
@pytest.mark.parametrize("name", CASES)
def test_items_are_the_same_at_once_and_streamed_and_events_add_up_to_them(client, name):
    said, values, expected = CASES[name]
    prompt = say(said.removeprefix(THINK)) + (THINK if said.startswith(THINK) else "")
    ask = {**ASK, "input": prompt, "tools": FLAT, **values}
    whole = client.responses.create(**ask)
    assert [told(item) for item in whole.output] == expected
    assert whole.status == ("incomplete" if name == "cut-off" else "completed")
    assert (whole.usage.output_tokens_details.reasoning_tokens > 0) == said.startswith(THINK)
    assert [tool.name for tool in whole.tools] == ["get_weather", "stop"]
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [told(item) for item in events[-1].response.output] == expected
    assert [told(event.item) for event in events if event.type == "response.output_item.done"] == expected
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == list(range(len(expected)))
    for event, item in zip(added, events[-1].response.output, strict=True):
        assert (event.item.id, event.item.status) == (item.id, "in_progress")
        deltas = [one.delta for one in events if one.type.endswith(".delta") and one.item_id == item.id]
        [done] = [one for one in events if one.type.endswith(("text.done", "arguments.done")) and one.item_id == item.id]
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == text == (done.arguments if item.type == "function_call" else done.text)


def test_the_clients_own_stream_comes_to_the_same_response(client):
    with client.responses.stream(**ASK, input=say(f"Wait. {BOTH}"), tools=FLAT) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert [(item.name, json.loads(item.arguments)) for item in final.output if item.type == "function_call"] == CALLS
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_a_function_returns_goes_into_the_next_request_with_what_was_said(client, served, stream):
    ask = {**ASK, "tools": FLAT}
    turn = [{"role": "user", "content": f"{say(f'Hm.</think>Wait. {OSLO}')} THINK"}]
    first = client.responses.create(**ask, input=turn)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turns = [*turn, *first.output, result, {"role": "user", "content": say("Sunny.")}]
    if stream:
        answer = list(client.responses.create(**ask, input=turns, stream=True))[-1].response
    else:
        answer = client.responses.create(**ask, input=turns)
    assert answer.output_text == "Sunny."
    spoken = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm."}
    function = {"name": call.name, "arguments": call.arguments}
    spoken["tool_calls"] = [{"id": call.call_id, "type": "function", "function": function}]
    messages = [*turn, spoken, {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"}, *user(say("Sunny."))]
    counted = served.post("/tokenize", messages=messages, tools=TOOLS).json()["count"]
    assert counted == answer.usage.input_tokens
    assert counted > served.post("/tokenize", messages=messages, tools=TOOLS, tool_choice="none").json()["count"]
    assert counted > served.post("/tokenize", messages=messages).json()["count"]


def test_answers_and_calls_are_parsed_into_types(client):
    class Trip(pydantic.BaseModel):
        city: str
        days: int

    trip = '{"city": "Oslo", "days": 3}'
    answer = client.responses.parse(**ASK, input=say(trip), text_format=Trip)
    assert answer.output_parsed == Trip(city="Oslo", days=3)
    call = f'<tool_call>\n{{"name": "Trip", "arguments": {trip}}}\n</tool_call>'
    tool = openai.pydantic_function_tool(Trip)["function"]
    answer = client.responses.parse(**ASK, input=say(call), tools=[{"type": "function", **tool}], tool_choice="required")
    assert answer.output[0].parsed_arguments == {"city": "Oslo", "days": 3}


def test_a_format_and_tools_contradict_each_other_by_the_names_of_this_endpoint(served):
    values = {"text": {"format": {"type": "json_object"}}, "tools": FLAT}
    error = served.post("/v1/responses", input="hi", **values).json()["error"]
    assert error["param"] == "text"
    assert "text and tools contradict each other" in error["message"]


def test_tools_of_tokenize_need_messages(served):
    answer = served.post("/tokenize", prompt="a", tools=TOOLS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
