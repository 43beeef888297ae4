"""Every field of a request changes its answer, in every mode, and to the one that LLM gives."""

import dataclasses

import pytest

from rapid_llm import SamplingParams
from rapid_llm.entrypoints.protocol.chat import ChatRequest
from rapid_llm.entrypoints.protocol.completions import CompletionRequest
from rapid_llm.entrypoints.protocol.fields import NO_EFFECT, SAMPLING
from tests.entrypoints.server.test_operations import wait_until
from tests.entrypoints.test_sampling_params import CASES, MESSAGES, PROMPT
from tests.tiny_model import END_ID

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def lists(values):
    return {name: list(value) if isinstance(value, range) else value for name, value in values.items()}


def as_request(path, values):
    """The fields as a client of this endpoint says them."""
    values = lists(values)
    if path == CHAT and "logprobs" in values:
        values |= {"logprobs": True, "top_logprobs": values["logprobs"]}
    if "logit_bias" in values:
        values["logit_bias"] = {str(token): bias for token, bias in values["logit_bias"].items()}
    if "grammar" in values:
        values["grammar"] = dataclasses.asdict(values["grammar"])
    return {**values, **({"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT})}


def whole(server, path, values):
    """What an answer says: texts, reasons, log-probs, scores of the prompt, tokens."""
    answer = server.post(path, **as_request(path, values))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    said = [
        (
            one["message"]["content"] if path == CHAT else one["text"],
            one["finish_reason"],
            one["stop_reason"],
            values_of(one["logprobs"]),
        )
        for one in body["choices"]
    ]
    return said, scores_of(body), body["usage"]["completion_tokens"]


def streamed(server, path, values):
    """The same, put together from a stream."""
    events = server.events(path, **as_request(path, values), stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    answers, scores = {}, None
    for event in events:
        scores = scores_of(event) or scores
        for one in event["choices"]:
            text, _, _, logprobs = answers.get(one["index"], ("", None, None, None))
            text += (one["delta"].get("content") or "") if path == CHAT else one["text"]
            new = values_of(one["logprobs"])
            answers[one["index"]] = (
                text, one["finish_reason"], one.get("stop_reason"), logprobs if new is None else (logprobs or []) + new,
            )  # fmt: skip
    return [answers[index] for index in sorted(answers)], scores, events[-1]["usage"]["completion_tokens"]


def scores_of(body):
    """Those of the prompt: of the whole in chat, of its first choice in completions."""
    return next((part["prompt_logprobs"] for part in (body, *body["choices"]) if "prompt_logprobs" in part), None)


def values_of(logprobs):
    if logprobs is None:
        return None
    if "content" in logprobs:
        return [(one["logprob"], [top["logprob"] for top in one["top_logprobs"]]) for one in logprobs["content"]]
    return list(zip(logprobs["token_logprobs"], [sorted(top.values()) for top in logprobs["top_logprobs"]], strict=True))


def in_process(llm, path, values):
    params = SamplingParams(**lists(values))
    [output] = llm.chat(MESSAGES, params) if path == CHAT else llm.generate(PROMPT, params)
    return [(answer.text, answer.finish_reason, answer.stop_reason) for answer in output.outputs]


@pytest.mark.case("H10")
@pytest.mark.parametrize("path", [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize("name", CASES)
def test_a_field_changes_the_answer_at_once_and_in_a_stream_and_to_what_llm_gives(server, llm, path, name):
    base, change = CASES[name]
    values = {**NEUTRAL, **base, **change}
    answer = whole(server, path, values)
    assert answer != whole(server, path, {**NEUTRAL, **base})
    assert [choice[:3] for choice in answer[0]] == in_process(llm, path, values)
    assert streamed(server, path, values) == answer


def test_every_field_of_a_request_is_tried():
    here = {
        "logprobs",
        "top_logprobs",
        "max_completion_tokens",
        "prompt",
        "messages",
        "echo",
        "model",
        "stream",
        "stream_options",
    }
    tried = {*SAMPLING, *NO_EFFECT, *here, "response_format", "tools", "tool_choice", "parallel_tool_calls"}
    assert set(SAMPLING) | {"logprobs"} == set(CASES)
    assert {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__} == tried


def test_max_completion_tokens_is_max_tokens(server):
    for fields in ({"max_completion_tokens": 3}, {"max_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 3}):
        usage = server.post(CHAT, messages=MESSAGES, ignore_eos=True, **fields).json()["usage"]
        assert usage["completion_tokens"] == 3
    answer = server.post(CHAT, messages=MESSAGES, max_completion_tokens=3, max_tokens=4)
    assert answer.status_code == 400
    assert "contradict each other: got 4 and 3" in answer.json()["error"]["message"]


def test_chat_takes_the_models_own_sampling_values_and_text_does_not(server, llm):
    values = {"seed": 5, "max_tokens": 16, "ignore_eos": True}
    [expected] = llm.chat(MESSAGES, llm.default_chat_params().with_defaults(**values))
    assert server.post(CHAT, messages=MESSAGES, **values).json()["choices"][0]["message"]["content"] == expected.outputs[0].text


def test_fields_without_effect_are_taken_and_logged(server):
    ask = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    plain = server.post(CHAT, **ask).json()["choices"]
    fields = {
        "user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "store": False,
        "safety_identifier": "s", "prompt_cache_key": "k",
    }  # fmt: skip
    assert set(fields) == set(NO_EFFECT)
    answer = server.post(CHAT, **ask, **fields, response_format={"type": "text"})
    assert answer.json()["choices"] == plain

    def mine():  # written behind the answer
        return [line for line in server.log if line.get("request_id") == answer.headers["x-request-id"]]

    wait_until(mine)
    assert mine()[0]["ignored"] == list(NO_EFFECT)


@pytest.mark.parametrize("prompt", ["hello", [71, 72], ["a", "b"], [[71], [72, 73]]], ids=["text", "ids", "texts", "id-lists"])
@pytest.mark.parametrize("n", [1, 2])
def test_prompts_of_every_form_are_answered_in_their_order(server, llm, prompt, n):
    values = {"max_tokens": 6, "seed": 3, "n": n, "ignore_eos": True}
    outputs = llm.generate(prompt, SamplingParams(**values))
    expected = [answer.text for output in outputs for answer in output.outputs]
    body = server.post(TEXT, prompt=prompt, **values).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert [choice["text"] for choice in body["choices"]] == expected
    assert body["usage"]["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    texts = dict.fromkeys(range(len(expected)), "")
    for event in server.events(TEXT, prompt=prompt, **values)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == expected


@pytest.mark.parametrize("prompt", ["hé✓", [71, 72, 73]], ids=["text", "ids"])
def test_echo_puts_the_prompt_and_its_logprobs_before_the_answer(server, llm, prompt):
    values = {"max_tokens": 4, "temperature": 0, "logprobs": 2}
    [output] = llm.generate([prompt], SamplingParams(**values, prompt_logprobs=2))
    answer, text = output.outputs[0], output.prompt or llm.tokenizer.decode(prompt)
    body = server.post(TEXT, prompt=prompt, echo=True, **values).json()["choices"][0]
    assert body["text"] == text + answer.text
    ids = output.prompt_token_ids + answer.token_ids
    entries = [*output.prompt_logprobs, *answer.logprobs]
    told = body["logprobs"]["token_logprobs"]
    assert told[0] is None
    assert told[1:] == pytest.approx([entry[token].logprob for token, entry in zip(ids, entries, strict=True) if entry])
    assert body["logprobs"]["text_offset"] == sorted(body["logprobs"]["text_offset"])
    events = server.events(TEXT, prompt=prompt, echo=True, **values)[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == body["text"]
    for part in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for event in events for one in event["choices"][0]["logprobs"][part]] == body["logprobs"][part]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_echo_without_an_answer_is_what_stands_before_an_answer(server, stream):
    ask = {"prompt": ["hello", "you"], "echo": True, "logprobs": 2, "temperature": 0, "stream_options": {"include_usage": True}}
    whole = server.post(TEXT, **{**ask, "stream_options": None}, max_tokens=1).json()["choices"]
    bodies = (
        server.events(TEXT, **ask, max_tokens=0)[:-1]
        if stream
        else [server.post(TEXT, **{**ask, "stream_options": None}, max_tokens=0).json()]
    )
    assert bodies[-1]["usage"]["completion_tokens"] == 0
    choices = sorted((choice for body in bodies for choice in body["choices"]), key=lambda choice: choice["index"])
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("hello", "length"), ("you", "length")]
    for choice, longer in zip(choices, whole, strict=True):
        length = len(choice["text"])
        assert choice["logprobs"] == {name: values[:length] for name, values in longer["logprobs"].items()}
    assert server.post(TEXT, prompt="hello", max_tokens=0).status_code == 400


def test_a_token_that_is_no_text_alone_is_told_by_its_bytes(server, llm):
    half = llm.tokenizer.encode("é")[0]
    answer = server.post(CHAT, messages=MESSAGES, max_tokens=1, temperature=0, logprobs=True, logit_bias={str(half): 100})
    [token] = answer.json()["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("bytes:\\xc3", [0xC3])


def test_tokenize_and_detokenize_are_what_requests_go_through(server, llm):
    tokens = server.post("/tokenize", prompt="hé").json()
    assert tokens == {"tokens": llm.tokenizer.encode("hé"), "count": 3, "max_model_len": 256}
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": "hé"}
    chat = server.post("/tokenize", messages=MESSAGES).json()["tokens"]
    [output] = llm.chat(MESSAGES, SamplingParams(max_tokens=1))
    assert chat == output.prompt_token_ids
    assert server.post("/detokenize", tokens=[257]).json() == {"prompt": "<|end|>"}
    assert server.post("/detokenize", tokens=[257], skip_special_tokens=True).json() == {"prompt": ""}


def test_parts_of_text_are_one_content_and_an_answer_may_be_sent_back(server):
    ask = {"max_tokens": 8, "temperature": 0}
    first = server.post(CHAT, messages=MESSAGES, **ask).json()["choices"][0]["message"]
    again = [*MESSAGES, first, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    plain = [*MESSAGES, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "ab"}]
    answers = [server.post(CHAT, messages=messages, **ask).json()["choices"] for messages in (again, plain)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_end_of_text_stands_last_in_the_log_probs_of_completions(server, llm, stream):
    ask = {"prompt": PROMPT, "max_tokens": 5, "logprobs": 1, "temperature": 0, "logit_bias": {str(END_ID): 90}, "min_tokens": 2}
    [output] = llm.generate(
        PROMPT, SamplingParams(max_tokens=5, logprobs=1, temperature=0, logit_bias={END_ID: 90}, min_tokens=2)
    )
    [answer] = output.outputs
    token, entry = answer.ending
    assert (token, len(answer.token_ids)) == (END_ID, 2)
    events = server.events("/v1/completions", **ask)[:-1] if stream else [server.post("/v1/completions", **ask).json()]
    logprobs = [event["choices"][0]["logprobs"] for event in events]
    assert [text for piece in logprobs for text in piece["tokens"]][2:] == ["<|end|>"]
    assert [value for piece in logprobs for value in piece["token_logprobs"]][2:] == [pytest.approx(entry[END_ID].logprob)]
