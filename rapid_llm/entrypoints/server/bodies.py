"""A request's body, read within limits, as the type that its endpoint takes."""

import asyncio
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from rapid_llm.entrypoints.protocol.decoding import decode
from rapid_llm.entrypoints.protocol.fields import ForModel
from rapid_llm.entrypoints.server.refusals import RefusalError
from rapid_llm.entrypoints.server.serving import Serving

if TYPE_CHECKING:
    from rapid_llm.entrypoints.async_llm import AsyncLLM

READ_SECONDS = 30.0
"""How long a body may take to arrive."""
_T = TypeVar("_T", bound=msgspec.Struct)
_Asked = TypeVar("_Asked", bound=ForModel)


async def read_for_model(request: Request, kind: type[_Asked]) -> "tuple[Serving, _Asked, AsyncLLM]":
    """The server, the request in a body, and the engine that it is for.

    Raises: as ``read`` and ``Serving.llm`` do; while no engine is ready before anything is read.
    """
    serving: Serving = request.app.state.serving
    serving.llm()
    ask = request.scope["asked"] = await read(request, kind, serving.config.max_body_bytes)
    return serving, ask, serving.llm(ask.model)


async def read(request: Request, kind: type[_T], max_bytes: int) -> _T:
    """The request in a body.

    Raises:
        RequestError: it is none of this kind.
        RefusalError: it is no JSON by its type (415), too long (413), or too slow (408).
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        problem, wanted, change = "the body's type is not served", "application/json", "set the header Content-Type"
        code = "unsupported_media_type"
        raise RefusalError(415, problem, code=code, got=repr(content_type), wanted=wanted, change=change)
    try:
        async with asyncio.timeout(READ_SECONDS):
            body = await _bytes(request, max_bytes)
    except TimeoutError:
        problem, change = f"the body did not arrive within {READ_SECONDS:.0f} seconds", "send it at once"
        raise RefusalError(408, problem, code="request_timeout", change=change) from None
    except ClientDisconnect:
        raise RefusalError(499, "the client has left", code="client_left") from None
    # A long list of ids takes a while, and others are streaming.
    return decode(body, kind) if len(body) < 2**16 else await asyncio.to_thread(decode, body, kind)


async def _bytes(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_long(f"{int(announced):,} bytes", max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_long(f"more than {max_bytes:,} bytes", max_bytes)
    return bytes(body)


def _too_long(got: str, max_bytes: int) -> RefusalError:
    wanted, change = f"at most {max_bytes:,} bytes", "shorten it, or raise max_body_bytes"
    return RefusalError(413, "the body is too long", code="body_too_long", got=got, wanted=wanted, change=change)
