"""Response formats and grammars over the wire: valid whatever the model would say, and refused by the field that is wrong."""

import json
import re
from typing import Literal

import openai
import pydantic
import pytest

from rapid_llm import Grammar, RequestError, SamplingParams

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
DRAWN = {"temperature": 1.3, "seed": 5, "max_tokens": 200}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["S", "M", "L"]}, "ok": {"type": "boolean"}},
    "required": ["size", "ok"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
CLOSING = {str(ord(char) - 33): 6.0 for char in '}"]'}  # random weights write JSON that may go on without an end


def by_schema(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("more", [{}, {"strict": True}, {"strict": False, "description": "An answer."}], ids=str)
def test_a_schema_holds_at_once_and_streamed_and_is_that_of_python(server, llm, more):
    ask = {"messages": MESSAGES, **DRAWN, "response_format": by_schema(SCHEMA, **more)}
    text = text_of(server.post(CHAT, **ask))
    assert set(json.loads(text)) == {"size", "ok"}
    pieces = [choice["delta"].get("content") or "" for event in server.events(CHAT, **ask)[:-1] for choice in event["choices"]]
    params = llm.default_chat_params().with_defaults(**DRAWN, grammar=GRAMMAR)
    assert "".join(pieces) == text == llm.chat(MESSAGES, params)[0].outputs[0].text


def test_any_json_object_is_one(server):
    answer = text_of(server.post(CHAT, messages=MESSAGES, response_format={"type": "json_object"}, logit_bias=CLOSING, **DRAWN))
    assert isinstance(json.loads(answer), dict)


@pytest.mark.parametrize(
    ("grammar", "form"),
    [
        ({"kind": "regex", "source": "[äé€]{3}-(ja|nein)"}, "[äé€]{3}-(ja|nein)"),
        ({"kind": "lark", "source": 'start: num ("+" num)~3\nnum: /[1-9]/'}, r"[1-9](\+[1-9]){3}"),
        ({"kind": "json_schema", "source": '{"type": "boolean"}'}, "true|false"),
    ],
    ids=lambda part: part["kind"] if isinstance(part, dict) else "",
)
def test_grammars_have_a_field_of_their_own_at_every_endpoint(server, grammar, form):
    values = {"temperature": 1.3, "seed": 5, "grammar": grammar}
    chat = server.post(CHAT, messages=MESSAGES, max_tokens=200, **values).json()["choices"][0]["message"]["content"]
    text = server.post(TEXT, prompt="hi", max_tokens=200, **values).json()["choices"][0]["text"]
    response = server.post(RESPONSES, input="hi", max_output_tokens=200, **values).json()["output"][0]["content"][0]["text"]
    for answer in (chat, text, response):
        assert re.fullmatch(form, answer), answer


class Shirt(pydantic.BaseModel):
    size: Literal["S", "M", "L"]
    ok: bool


def test_the_openai_client_parses_chat_and_responses(client):
    values = {"model": "tiny", "temperature": 1.3}
    said = client.chat.completions.parse(messages=MESSAGES, response_format=Shirt, **values).choices[0].message
    assert isinstance(said.parsed, Shirt)
    with client.chat.completions.stream(messages=MESSAGES, response_format=Shirt, **values) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Shirt)
    assert isinstance(client.responses.parse(input="hi", text_format=Shirt, **values).output_parsed, Shirt)


BAD_SCHEMAS = [{"type": "objekt"}, {"type": "array", "uniqueItems": True}, {"$ref": "#/nowhere"}, {"enum": ["x" * 100_000]}]


@pytest.mark.parametrize("is_stream", [False, True], ids=["at-once", "stream"])
@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=lambda schema: str(schema)[:24])
def test_a_bad_schema_is_refused_by_its_field_in_the_words_of_python(server, canary, llm, schema, is_stream):
    answer = server.post(CHAT, messages=MESSAGES, response_format=by_schema(schema), stream=is_stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "response_format", "invalid_value")
    flat = {"type": "json_schema", "name": "a", "schema": schema}
    assert server.post(RESPONSES, input="hi", text={"format": flat}).json()["error"]["param"] == "text"
    with pytest.raises(RequestError) as raised:
        llm.chat(MESSAGES, SamplingParams(grammar=Grammar("json_schema", json.dumps(schema, separators=(",", ":")))))
    assert error["message"] == str(raised.value)


@pytest.mark.parametrize(
    ("grammar", "param", "says"),
    [
        ({"kind": "regex", "source": "(a"}, "grammar", "unclosed group"),
        ({"kind": "xml", "source": "<a/>"}, "grammar", "wanted json_schema | json_object | regex | lark"),
        ({"kind": "regex"}, "grammar", "wanted the regex as a string"),
        ({"kind": "json_schema", "source": "{"}, "grammar", "is no JSON"),
        ({"kind": "regex", "sauce": "a"}, "grammar.sauce", "unknown field"),
        ({"source": "a"}, "grammar.kind", "grammar.kind is missing"),
        ("a+", "grammar", "grammar cannot be used"),
    ],
)
def test_a_bad_grammar_is_refused_by_its_field(server, canary, grammar, param, says):
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "hi"}), (RESPONSES, {"input": "hi"})):
        answer = server.post(path, **prompt, grammar=grammar)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert says in error["message"]


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
        (by_schema({}, strikt=True), "response_format.json_schema.strikt"),
        (by_schema([1]), "response_format.json_schema.schema"),
    ],
    ids=lambda part: str(part)[:40],
)
def test_a_format_of_another_form_is_refused_by_its_place(server, canary, format, param):
    answer = server.post(CHAT, messages=MESSAGES, response_format=format)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_format_and_a_grammar_contradict_each_other_and_text_does_not(server):
    grammar = {"kind": "regex", "source": "ab"}
    answer = server.post(CHAT, messages=MESSAGES, response_format={"type": "json_object"}, grammar=grammar)
    assert "response_format and grammar contradict each other: got json_object and regex" in answer.json()["error"]["message"]
    assert text_of(server.post(CHAT, messages=MESSAGES, response_format={"type": "text"}, grammar=grammar)) == "ab"


@pytest.mark.parametrize("depth", [60, 400, 900, 5000])
def test_a_schema_of_any_depth_is_served_or_refused(server, canary, depth):
    body = '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "response_format": {"type": "json_schema", '
    body += '"json_schema": {"schema": ' + '{"items":' * depth + "{}" + "}" * depth + "}}}"
    answer = server.http.post(CHAT, content=body.encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400), answer.text
