"""What cannot be served is refused in OpenAI's shape, with the words that Python has for it, and hurts only its sender."""

import contextlib
import http.client
import json

import pytest

from rapid_llm import RequestError, SamplingParams
from rapid_llm.errors import RapidError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
VOCAB = 261

BAD_VALUES = {
    "temperature": [-1, "hot", True],
    "top_p": [0, 1.5],
    "top_k": [-2, 1.5],
    "min_p": [2],
    "seed": [2**63],
    "n": [0, 129],
    "max_tokens": [0, -1, "5"],
    "min_tokens": [-1, 500],
    "stop": ["", [""], 3],
    "stop_token_ids": [[-1], ["a"], [VOCAB], [2**31]],
    "ignore_eos": [1, "yes"],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "repetition_penalty": [0],
    "logit_bias": [{"-1": 1}, {str(VOCAB): 1}, {str(2**31): 1}, {"AI": 1}, {"1.5": 1}, {"5": "x"}, {"5": 101}],
    "bad_words": [""],
    "prompt_logprobs": [21, -1],
    "skip_special_tokens": [0],
}


def refused(answer, status=400):
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.case("I11")
@pytest.mark.parametrize("path", [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values], ids=lambda part: str(part)[:20]
)
def test_a_value_out_of_range_is_refused_with_the_words_of_python(server, llm, path, name, value):
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    error = refused(server.post(path, **asked, **{name: value}))
    assert (error["type"], error["param"]) == ("invalid_request_error", name)
    given = value
    if name == "logit_bias":
        given = {int(key) if key.lstrip("-").isdigit() else key: bias for key, bias in value.items()}

    def in_python():
        params = SamplingParams(**{name: given})
        return llm.chat(MESSAGES, params) if path == CHAT else llm.generate("hi", params)

    with pytest.raises(RequestError) as raised:
        in_python()
    assert error["message"] == str(raised.value)


@pytest.mark.case("I11")
@pytest.mark.parametrize("value", [-1, 21, 2**31, "AI", 1.5])
def test_logprobs_out_of_range_are_refused(server, canary, value):
    assert refused(server.post(TEXT, prompt="hi", logprobs=value))["param"] == "logprobs"
    error = refused(server.post(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=value))
    assert error["param"] in ("top_logprobs", "logprobs")


@pytest.mark.case("H2")
def test_top_logprobs_above_20_are_refused_and_top_k_above_the_vocabulary_is_off(server, llm, canary):
    error = refused(server.post(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=21))
    assert "got 21, wanted 0 to 20" in error["message"]
    texts = {
        server.post(TEXT, prompt="hi", seed=3, max_tokens=12, top_k=top_k).json()["choices"][0]["text"]
        for top_k in (-1, 0, VOCAB, VOCAB + 1, 10**7)
    }
    assert len(texts) == 1


CONTEXT, POOL = 256, 1024


@pytest.mark.case("I8")
@pytest.mark.parametrize("path", [CHAT, TEXT], ids=["chat", "text"])
def test_lengths_past_the_context_are_refused_with_counts_and_never_clamped(server, canary, path):
    frame = 3 if path == CHAT else 0  # tokens that the template puts around a message

    def ask(length, **values):
        text = "x" * (length - frame)
        prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        return server.post(path, **prompt, **values, ignore_eos=True, temperature=0)

    for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
        error = refused(ask(length))
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("messages" if path == CHAT else "prompt")
        assert f"got {length} tokens, wanted at most {CONTEXT - 1}" in error["message"]
    error = refused(ask(200, max_tokens=57))
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert "got 200 prompt tokens + max_tokens 57, wanted at most 256 together" in error["message"]
    for length, values, said in ((200, {"max_tokens": 56}, 56), (200, {}, 56), (CONTEXT - 1, {}, 1), (200, {"max_tokens": 1}, 1)):
        assert ask(length, **values).json()["usage"]["completion_tokens"] == said


@pytest.mark.case("I12")
@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [VOCAB], [[VOCAB]], [-1], ["a", 3], [1, "a"], [[1], "a"]], ids=str)
def test_prompts_of_nothing_or_of_unknown_ids_are_refused(server, canary, prompt):
    assert refused(server.post(TEXT, prompt=prompt))["param"] == "prompt"


@pytest.mark.case("I12")
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages"),
        ([{"role": "", "content": "x"}], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0].type"),
        ("hi", "messages"),
        (None, "messages"),
    ],
    ids=str,
)
def test_messages_that_are_none_are_refused_by_place(server, canary, messages, param):
    assert refused(server.post(CHAT, messages=messages))["param"] == param


@pytest.mark.case("H10")
@pytest.mark.parametrize(
    "field",
    [
        "max_tokns",
        "best_of",
        "suffix",
        "guided_json",
        "response_format",
        "store",
        "stream_options",
        "tools",
        "functions",
        "model",
    ],
)
def test_what_is_not_supported_is_refused_by_name(server, canary, field):
    value = {"store": True, "stream_options": {"every": 1}, "model": "gpt-9", "response_format": {"type": "xml"}}.get(field, "x")
    status = 404 if field == "model" else 400
    error = refused(server.post(CHAT, messages=MESSAGES, **{field: value}), status)
    assert error["param"].startswith(field)
    assert field in error["message"] or value in error["message"]


def test_an_unknown_field_names_the_nearest(server):
    error = refused(server.post(TEXT, prompt="hi", max_tokns=3))
    assert error["code"] == "unknown_parameter"
    assert error["message"] == "unknown field: got 'max_tokns', wanted perhaps 'max_tokens'; correct its name or remove it."


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 50_000, b'{"prompt": "\\ud800"}', b"{}" * 2],
    ids=["empty", "half", "list", "null", "text", "no-utf8", "no-utf8-inside", "deep", "half-a-character", "two"],
)
def test_a_body_that_is_no_request_is_refused(server, canary, body):
    answer = server.http.post(TEXT, content=body, headers={"Content-Type": "application/json"})
    assert refused(answer)["type"] == "invalid_request_error"


def test_a_body_of_another_type_or_too_long_is_refused(server, canary):
    assert refused(server.http.post(TEXT, content=b"{}", headers={"Content-Type": "text/plain"}), 415)["code"]
    for headers in ({}, {"Transfer-Encoding": "chunked"}):
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        pieces = [b"x" * 2**20] * 17
        body = b"".join(pieces) if not headers else iter(pieces)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            client.request("POST", TEXT, body, {"Content-Type": "application/json", **headers}, encode_chunked=bool(headers))
        assert client.getresponse().status == 413
        client.close()


def test_unknown_paths_and_methods_are_refused_in_the_same_shape(server):
    assert refused(server.http.get("/v2/nothing"), 404)["code"] == "unknown_path"
    assert refused(server.http.get(TEXT), 405)["code"] == "method_not_allowed"
    assert refused(server.http.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert server.http.get("/v1/models/tiny").json()["id"] == "tiny"


@pytest.mark.case("H5")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_bans_every_token_is_told_so(server, canary, stream):
    bans = {str(token): -100 for token in range(VOCAB)}
    error = refused(server.post(TEXT, prompt="hi", logit_bias=bans, stream=stream))
    assert "every token was banned" in error["message"]


def test_the_request_id_comes_back_or_is_made(server):
    assert server.http.get("/ready", headers={"X-Request-Id": "mine-7"}).headers["x-request-id"] == "mine-7"
    made = [server.http.get("/ready", headers={"X-Request-Id": "two words"}).headers["x-request-id"] for _ in range(2)]
    assert len({*made, "two words"}) == 3


def test_tokenize_refuses_what_it_cannot_read(server):
    assert refused(server.post("/tokenize"))["message"].startswith("prompt or messages: got neither")
    assert refused(server.post("/tokenize", prompt="a", messages=MESSAGES))["message"].startswith("prompt or messages: got both")
    assert refused(server.post("/detokenize", tokens=[VOCAB]))["param"] == "tokens"


def test_every_refusal_says_what_to_change():
    from rapid_llm.entrypoints.server.refusals import RefusalError, detail_of

    error: RapidError = RefusalError(429, "too many", code="too_many", got="3", wanted="2", change="wait", retry_after=1)
    assert detail_of(error).message == "too many: got 3, wanted 2; wait."
    assert json.loads(json.dumps(detail_of(error).type)) == "rate_limit_error"
