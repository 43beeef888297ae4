"""litellm: completion, stream and tools, with its provider for servers that speak OpenAI's protocol."""

import json

import pytest

from tests.entrypoints.server.weather import CALLS

SAID = ["It is sunny.", len("It is sunny.")]
CALLED = [*map(list, CALLS), "tool_calls"]


@pytest.fixture(scope="module")
def came(run, base_url):
    return json.loads(run("litellm", "tests.clients.use_litellm", base_url, LITELLM_LOCAL_MODEL_COST_MAP="True"))


def test_text_and_usage_are_the_same_at_once_and_streamed(came):
    assert came["whole"] == came["streamed"] == SAID


def test_calls_are_the_same_at_once_and_streamed(came):
    assert came["calls"] == came["streamed calls"] == CALLED


def test_a_refusal_is_its_own_error_with_the_servers_words(came):
    assert "temperature is out of range: got -1" in came["refused"]
