"""POST /tokenize and /detokenize: the model's tokenizer, as requests go through it."""

import asyncio
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rapid_llm.entrypoints.protocol.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from rapid_llm.entrypoints.server.bodies import read_for_model
from rapid_llm.entrypoints.tools.choice import plan_tools
from rapid_llm.entrypoints.tools.formats import tool_format
from rapid_llm.errors import RequestError

if TYPE_CHECKING:
    from rapid_llm.engine.frontend import Frontend


async def tokenize(request: Request) -> Response:
    """Ids of a text or a conversation."""
    serving, ask, llm = await read_for_model(request, TokenizeRequest)
    frontend = await llm.frontend()
    tokens = await asyncio.to_thread(_ids, ask, frontend, serving.config.tool_format)
    return _json(TokenizeResponse(tokens, len(tokens), (await llm.ready()).max_model_len))


async def detokenize(request: Request) -> Response:
    """Text of ids."""
    _, ask, llm = await read_for_model(request, DetokenizeRequest)
    frontend = await llm.frontend()
    frontend.check_ids("tokens", ask.tokens)
    text = await asyncio.to_thread(frontend.tokenizer.decode, ask.tokens, ask.skip_special_tokens)
    return _json(DetokenizeResponse(text))


def _ids(ask: TokenizeRequest, frontend: "Frontend", format_setting: str | None) -> list[int]:
    if (ask.prompt is None) == (ask.messages is None):
        got = "neither" if ask.prompt is None else "both"
        raise RequestError("prompt or messages", param="prompt", got=got, wanted="one of the two", change="send one of them")
    if ask.messages is not None:
        format = tool_format(frontend.tokenizer.chat_template, format_setting)
        shown = plan_tools(ask.tools, ask.tool_choice, format).shown
        return frontend.encode_chat([message.for_template() for message in ask.messages], shown)[1]
    if ask.tools is not None or ask.tool_choice is not None:
        change = "send messages, or leave tools and tool_choice out"
        raise RequestError("tools need a conversation", param="tools", got="a prompt", wanted="messages", change=change)
    return frontend.tokenizer.encode(ask.prompt or "", add_special_tokens=ask.add_special_tokens)


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
