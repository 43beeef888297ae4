"""openai's asynchronous client: text, tools and parsed answers, at once and streamed."""

import asyncio
import json
from functools import partial

import openai
import pydantic

from tests.entrypoints.server.weather import BOTH, CALLS, TOOLS, user
from tests.scripted_engine import say


class Trip(pydantic.BaseModel):
    city: str
    days: int


TRIP = '{"city": "Oslo", "days": 3}'


def run(base_url, scenario):
    async def within():
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            return await scenario(partial(client.chat.completions.create, model="tiny", max_tokens=300), client)

    return asyncio.run(within())


def test_text_and_calls_are_the_same_at_once_and_streamed(base_url):
    async def scenario(create, client):
        whole = await create(messages=user(say(BOTH)), tools=TOOLS)
        calls = whole.choices[0].message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS
        names, arguments = [], {}
        async for chunk in await create(messages=user(say(BOTH)), tools=TOOLS, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                names += [call.function.name] if call.function.name else []
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
        assert [(name, json.loads(arguments[place])) for place, name in enumerate(names)] == CALLS

        answers = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
        turns = [*user("Weather?"), whole.choices[0].message, *answers, *user(say("It is sunny."))]
        said = await create(messages=turns, tools=TOOLS)
        assert said.choices[0].message.content == "It is sunny."

    run(base_url, scenario)


def test_an_answer_is_parsed_into_a_type_at_once_and_from_a_stream(base_url):
    async def scenario(_, client):
        ask = {"model": "tiny", "messages": user(say(TRIP)), "response_format": Trip, "max_tokens": 100}
        whole = await client.chat.completions.parse(**ask)
        assert whole.choices[0].message.parsed == Trip(city="Oslo", days=3)
        async with client.chat.completions.stream(**ask) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Trip(city="Oslo", days=3)
        assert {"content.delta", "content.done"} <= kinds

    run(base_url, scenario)


def test_a_call_is_parsed_into_the_tools_own_type(base_url):
    call = '<tool_call>\n{"name": "Trip", "arguments": ' + TRIP + "}\n</tool_call>"

    async def scenario(_, client):
        ask = {"model": "tiny", "messages": user(say(call)), "tools": [openai.pydantic_function_tool(Trip)], "max_tokens": 200}
        whole = await client.chat.completions.parse(**ask, tool_choice="required")
        [its] = whole.choices[0].message.tool_calls
        assert its.function.parsed_arguments == Trip(city="Oslo", days=3)

    run(base_url, scenario)
