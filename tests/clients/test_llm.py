"""llm, on the command line, with the server as one of its extra-openai-models."""

import json
from functools import partial

import pytest

from tests.scripted_engine import say

TOOL = """
def get_weather(city: str) -> str:
    "Now."
    return "SAY[[It is sunny in " + city + ".]]"
"""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
def prompt(run, base_url, tmp_path):
    model = {"model_id": "tiny", "model_name": "tiny", "api_base": base_url, "api_key_name": "none"}
    more = {"supports_tools": True, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model | more]))  # JSON is YAML
    return partial(run, "llm", "llm", "prompt", "-m", "tiny", LLM_USER_PATH=str(tmp_path), LLM_LOAD_PLUGINS="")


def test_a_prompt_is_answered_streamed_and_at_once(prompt):
    options = ("-o", "temperature", "0", "-o", "max_tokens", "50")
    assert prompt("-s", "be brief", say("It is sunny."), *options) == "It is sunny."
    assert prompt("--no-stream", say("It is sunny."), *options) == "It is sunny."


def test_a_schema_holds(prompt):
    said = '{"city": "Oslo", "days": 3}'
    assert json.loads(prompt("--schema", "city, days int", say(said))) == {"city": "Oslo", "days": 3}


def test_a_function_is_called_and_what_it_returns_is_answered(prompt):
    assert prompt("--functions", TOOL, say(CALL)).endswith("It is sunny in Oslo.")
