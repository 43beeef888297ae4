"""What somebody may write with litellm: ``python -m tests.clients.use_litellm URL`` prints what came, as JSON."""

import json
import sys
from functools import partial

import litellm

from tests.entrypoints.server.weather import BOTH, TOOLS, user
from tests.scripted_engine import say

litellm.suppress_debug_info = True
complete = partial(litellm.completion, model="openai/tiny", base_url=sys.argv[1], api_key="none", num_retries=0)
text = {"messages": user(say("It is sunny.")), "max_tokens": 100, "temperature": 0, "top_p": 1, "seed": 1, "user": "me"}
tools = {"messages": user(say(BOTH)), "tools": TOOLS, "tool_choice": "auto", "max_tokens": 300}


def calls_of(answer):
    [choice] = answer.choices
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    return [*calls, choice.finish_reason]


def streamed():
    chunks = list(complete(**text, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return [said, *(chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None))]


def refused():
    try:
        complete(messages=user("hi"), temperature=-1)
    except litellm.BadRequestError as error:
        return str(error)


whole = complete(**text)
print(  # noqa: T201 - the test reads it
    json.dumps(
        {
            "whole": [whole.choices[0].message.content, whole.usage.completion_tokens],
            "streamed": streamed(),
            "calls": calls_of(complete(**tools)),
            "streamed calls": calls_of(litellm.stream_chunk_builder(list(complete(**tools, stream=True)))),
            "refused": refused(),
        }
    )
)
