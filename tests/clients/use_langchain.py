"""What somebody may write with langchain-openai: ``python -m tests.clients.use_langchain URL`` prints what came, as JSON."""

import json
import sys
from functools import reduce
from operator import add

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.entrypoints.server.weather import BOTH, TOOLS
from tests.scripted_engine import say

TRIP = '{"city": "Oslo", "days": 3}'


class Trip(pydantic.BaseModel):
    """A trip."""

    city: str
    days: int


chat = ChatOpenAI(model="tiny", base_url=sys.argv[1], api_key="none", max_retries=0, max_tokens=300, temperature=0)
bound = chat.bind_tools(TOOLS)


def calls_of(answer):
    return [(call["name"], call["args"]) for call in answer.tool_calls]


def structured(method):
    said = f'<tool_call>\n{{"name": "Trip", "arguments": {TRIP}}}\n</tool_call>' if method == "function_calling" else TRIP
    return chat.with_structured_output(Trip, method=method).invoke(say(said)).model_dump()


whole, called = chat.invoke(say("It is sunny.")), bound.invoke(say(BOTH))
results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in called.tool_calls]
print(  # noqa: T201 - the test reads it
    json.dumps(
        {
            "whole": [whole.content, whole.usage_metadata["output_tokens"]],
            "streamed": "".join(piece.content for piece in chat.stream(say("It is sunny."))),
            "batch": [answer.content for answer in chat.batch([say("a"), say("b")])],
            "calls": calls_of(called),
            "streamed calls": calls_of(reduce(add, bound.stream(say(BOTH)))),
            "behind results": bound.invoke([HumanMessage("?"), called, *results, HumanMessage(say("Done."))]).content,
            "structured": [structured(method) for method in ("json_schema", "function_calling", "json_mode")],
        }
    )
)
