"""langchain-openai: ChatOpenAI's invoke, stream, batch, bind_tools and with_structured_output."""

import json

import pytest

from tests.entrypoints.server.weather import CALLS


@pytest.fixture(scope="module")
def came(run, base_url):
    return json.loads(run("langchain_openai", "tests.clients.use_langchain", base_url, LANGSMITH_TRACING="false"))


def test_invoke_stream_and_batch_say_the_same(came):
    assert came["whole"] == ["It is sunny.", len("It is sunny.")]
    assert came["streamed"] == "It is sunny."
    assert came["batch"] == ["a", "b"]


def test_bound_tools_are_called_at_once_and_streamed_and_answered(came):
    assert came["calls"] == came["streamed calls"] == [list(call) for call in CALLS]
    assert came["behind results"] == "Done."


def test_structured_output_is_of_the_type_by_every_method(came):
    assert came["structured"] == [{"city": "Oslo", "days": 3}] * 3
