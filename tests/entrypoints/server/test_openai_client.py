"""What people have already: the openai client, at once, from an event loop, and as a stream."""

import asyncio

import openai
import pytest

from rapid_llm import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]
ASK = {"max_tokens": 12, "temperature": 0}
PARAMS = SamplingParams(**ASK)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def said(llm):
    [output] = llm.chat(MESSAGES, llm.default_chat_params().with_defaults(**ASK))
    return output.outputs[0].text


def test_models_chat_and_completions(client, llm, said):
    [model] = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "tiny"
    answer = client.chat.completions.create(model=model.id, messages=MESSAGES, user="me", store=False, **ASK)
    assert (answer.choices[0].message.content, answer.choices[0].message.role) == (said, "assistant")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    answer = client.completions.create(model=model.id, prompt="hello", extra_body={"ignore_eos": True, "top_k": 5}, **ASK)
    params = SamplingParams(**ASK, ignore_eos=True, top_k=5)
    assert answer.choices[0].text == llm.generate("hello", params)[0].outputs[0].text


def test_a_stream_with_usage_and_logprobs(client, said):
    values = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **ASK}
    text, logprobs, usage = "", [], None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **values):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            logprobs += choice.logprobs.content if choice.logprobs else []
    whole = client.chat.completions.create(**values)
    assert text == whole.choices[0].message.content == said
    assert logprobs == whole.choices[0].logprobs.content
    assert usage.completion_tokens == whole.usage.completion_tokens == len(logprobs)


def test_from_an_event_loop_and_a_stream_that_is_left(server, said):
    async def scenario():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asks = [client.chat.completions.create(model="tiny", messages=MESSAGES, **ASK) for _ in range(8)]
            assert {answer.choices[0].message.content for answer in await asyncio.gather(*asks)} == {said}
            stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **ASK)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == said
            left = await client.completions.create(model="tiny", prompt="a", max_tokens=200, stream=True)
            async for _ in left:
                break
            await left.close()

    asyncio.run(scenario())


def test_refusals_are_the_clients_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature is out of range: got -1") as raised:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert (raised.value.param, raised.value.code, raised.value.type) == ("temperature", "invalid_value", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="wanted 'tiny'"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    bans = {str(token): -100 for token in range(261)}
    with pytest.raises(openai.BadRequestError, match="every token was banned"):
        client.completions.create(model="tiny", prompt="a", stream=True, logit_bias=bans)
