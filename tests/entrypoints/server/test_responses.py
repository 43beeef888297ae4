"""/v1/responses through the openai client and over the wire: whole, streamed, refused where something would have to be kept."""

import dataclasses

import openai
import pytest

from tests.entrypoints.test_sampling_params import CASES, MESSAGES
from tests.tiny_model import END_ID

ASK = {"temperature": 0, "max_output_tokens": 12}
SHARED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "grammar"),
    "skip_special_tokens",
)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def in_chat(server, messages, **values):
    answer = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=12, **values).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]


def test_text_and_usage_are_those_of_chat(server, client):
    text, usage = in_chat(server, [{"role": "system", "content": "be brief"}, *MESSAGES])
    answer = client.responses.create(model="tiny", input="hi", instructions="be brief", store=False, metadata={"a": "b"}, **ASK)
    assert answer.output_text == text
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (answer.metadata, answer.instructions) == ({"a": "b"}, "be brief")
    longer = client.responses.create(model="tiny", input="hi", extra_body={"ignore_eos": True}, **ASK)
    assert (longer.status, longer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_an_answer_goes_into_the_next_request_as_it_came(server, client):
    first = client.responses.create(model="tiny", input=MESSAGES, **ASK)
    turns = [*MESSAGES, *first.output, {"role": "user", "content": [{"type": "input_text", "text": "go on"}]}]
    second = client.responses.create(model="tiny", input=turns, **ASK)
    messages = [*MESSAGES, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "go on"}]
    assert second.output_text == in_chat(server, messages)[0]


def test_a_stream_tells_each_part_begun_grown_and_done(client):
    whole = client.responses.create(model="tiny", input="hi", **ASK)
    events = list(client.responses.create(model="tiny", input="hi", stream=True, **ASK))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", events[-1].response.status),
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    ending = {"extra_body": {"min_tokens": 3, "logit_bias": {str(END_ID): 90}}}
    with client.responses.stream(model="tiny", input="hi", **ASK, **ending) as stream:
        assert stream.get_final_response().output_text == whole.output_text[: len("xyz")]


@pytest.mark.case("H10")
@pytest.mark.parametrize("name", SHARED)
def test_a_field_changes_the_answer_as_it_does_in_chat(server, name):
    base, change = CASES[name]

    def said(path, values, **renamed):
        values = {name: list(value) if isinstance(value, range) else value for name, value in values.items()}
        count = values.pop("max_tokens")
        if "grammar" in values:
            values["grammar"] = dataclasses.asdict(values["grammar"])
        body = {
            "top_p": 1.0,
            "top_k": 0,
            **values,
            **{field: count if value is ... else value for field, value in renamed.items()},
        }
        answer = server.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def response(values):
        answer = said("/v1/responses", values, input=MESSAGES, max_output_tokens=...)
        return answer["output"][0]["content"][0]["text"], answer["usage"]["output_tokens"]

    def chat(values):
        answer = said("/v1/chat/completions", values, messages=MESSAGES, max_tokens=...)
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]

    assert response({**base, **change}) == chat({**base, **change}) != response(base)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("previous_response_id", "resp-1", "previous_response_id cannot be used"),
        ("store", True, "store"),
        ("background", True, "background"),
        ("truncation", "auto", "truncation"),
        ("tools", [], "tools is empty"),
        ("tools", [{"type": "web_search"}], "web_search"),
        ("tool_choice", "required", "tool_choice needs tools"),
        ("parallel_tool_calls", False, "parallel_tool_calls needs tools"),
        ("input", [{"role": "user"}], "input[0].content is missing: got type 'message'"),
        ("input", [{"role": "user", "content": "a", "call_id": "1"}], "input[0].call_id cannot be used"),
        ("input", [{"type": "function_call_output", "output": "a"}], "input[0].call_id is missing"),
        ("input", [{"type": "item_reference", "id": "a"}], "item_reference"),
        ("max_output_tokens", 0, "max_tokens is out of range"),
        ("temperature", "hot", "temperature is out of range: got 'hot'"),
        ("input", [], "messages is empty"),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}], "input_image"),
    ],
)
def test_what_would_have_to_be_kept_or_is_not_served_is_refused(server, canary, field, value, says):
    answer = server.post("/v1/responses", **{"input": "hi", field: value})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
