"""/v1/embeddings through the openai client and over the wire: whatever form the input has, the vector is the model's."""

import asyncio
import base64
import struct

import openai
import pytest

from tests.entrypoints.server.test_operations import is_idle, wait_until

PATH = "/v1/embeddings"


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def vector(llm, prompt, *values, **named):
    [output] = llm.embed(prompt, *values, **named)
    return output.embedding


def near(values):
    return pytest.approx(values, abs=1e-5)


def test_the_client_gets_the_vectors_of_python_whatever_the_inputs_form(client, llm):
    text, ids = "hello", llm.tokenizer.encode("hello")
    for given in (text, [text], ids, [ids]):  # the client asks for base64
        answer = client.embeddings.create(model="tiny", input=given, user="me")
        assert [one.embedding for one in answer.data] == [near(vector(llm, text))]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5, 5)
    answer = client.embeddings.create(model="tiny", input=["a", "", "hello"][::2], encoding_format="float", dimensions=8)
    assert [one.index for one in answer.data] == [0, 1]
    assert [one.embedding for one in answer.data] == [near(vector(llm, one, dimensions=8)) for one in ("a", "hello")]
    assert answer.usage.total_tokens == 6


def test_base64_is_of_the_same_float32_numbers(server):
    plain, packed = (
        server.post(PATH, input="hello", encoding_format=form).json()["data"][0]["embedding"] for form in ("float", "base64")
    )
    assert list(struct.unpack(f"<{len(plain)}f", base64.b64decode(packed))) == near(plain)


@pytest.mark.case("H10")
@pytest.mark.parametrize("change", [{"pooling": "mean"}, {"normalize": False}, {"dimensions": 3}], ids=str)
def test_a_field_changes_the_vector_as_it_does_in_python(server, llm, change):
    data = server.post(PATH, input="hello", **change).json()["data"]
    assert data[0]["embedding"] == near(vector(llm, "hello", **change)) != vector(llm, "hello")


@pytest.mark.case("I8")
@pytest.mark.case("I12")
@pytest.mark.parametrize(
    ("values", "param", "says"),
    [
        ({"input": ""}, "input", "the prompt is empty"),
        ({"input": []}, "input", "the prompt is empty"),
        ({"input": ["a", ""]}, "input", "the prompt is empty"),
        ({"input": [[]]}, "input", "the prompt is empty"),
        ({"input": "x" * 257}, "input", "longer than the context: got 257 tokens, wanted at most 256"),
        ({"input": [5, "a"]}, "input", "a mixed list"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [261]}, "input", "out of the vocabulary"),
        ({"input": 5}, "input", "input cannot be used"),
        ({}, "input", "input is missing"),
        ({"input": "a", "dimensions": 65}, "dimensions", "wanted 1 to 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions is out of range"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "got 'hex'"),
        ({"input": "a", "pooling": "max"}, "pooling", "got 'max'"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown field"),
    ],
    ids=str,
)
def test_what_cannot_be_embedded_is_refused_by_its_field(server, canary, values, param, says):
    answer = server.post(PATH, **values)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"]


def test_a_full_context_is_embedded_and_a_crowd_of_answers_changes_no_vector(server, client, llm, canary):
    texts = ["x" * 256, *(f"text {number} " * 5 for number in range(6))]

    async def scenario():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            talks = [client.completions.create(model="tiny", prompt=f"{i}", max_tokens=60, seed=i) for i in range(12)]
            vectors = [client.embeddings.create(model="tiny", input=texts, extra_body={"pooling": "mean"}) for _ in range(3)]
            return (await asyncio.gather(*talks, *vectors))[12:]

    expected = [near(vector(llm, text, "mean")) for text in texts]
    for answer in asyncio.run(scenario()):
        assert [one.embedding for one in answer.data] == expected
    wait_until(lambda: is_idle(server))
