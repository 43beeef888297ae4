"""One request for text, from its first token to its last: it holds places, ends with its client, and is counted either way."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Protocol, cast

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rapid_llm.engine.output import EVERY_TOKEN_BANNED, RequestOutput
from rapid_llm.entrypoints.server.merging import merged
from rapid_llm.entrypoints.server.metrics import Record
from rapid_llm.entrypoints.server.refusals import RefusalError, refuse
from rapid_llm.entrypoints.server.serving import Serving
from rapid_llm.errors import RapidError, RequestError

SEND_SECONDS = 60.0
"""How long a client may leave what it is sent unread, before it counts as gone."""


class WholeWriter(Protocol):
    """Puts answers that are sent at once into the form of one endpoint."""

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The body of an answer."""


class Writer(WholeWriter, Protocol):
    """The same, and streams."""

    def begin(self) -> bytes:
        """The first events of a stream."""

    def piece(self, place: int, output: RequestOutput) -> bytes:
        """The events of what is new in the output of prompt ``place``; empty where nothing is to be told."""

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The last events of a stream."""

    def failure(self, error: RapidError) -> bytes:
        """The last event of a stream that has broken off."""


class Exchange:
    """An ASGI app that answers one request.

    Args:
        serving: where places and counts are.
        streams: one for each prompt.
        count: places to hold: answers to all prompts.
        writer: the form of the answer.
        is_stream: whether it is sent as it grows, which ``writer`` must know how to.
        renamed: what fields that Python's errors name are called in this request; "" is an error that names none.
    """

    def __init__(
        self,
        serving: Serving,
        streams: Sequence[AsyncGenerator[RequestOutput]],
        count: int,
        writer: WholeWriter,
        *,
        is_stream: bool,
        renamed: Mapping[str, str],
    ) -> None:
        self._serving, self._streams, self._count = serving, streams, count
        self._writer, self._is_stream, self._renamed = writer, is_stream, renamed
        self._events = cast("Writer", writer)
        self._outputs: dict[int, RequestOutput] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or stop as soon as the client has left."""
        with self._serving.places(self._count), self._serving.metrics.record(scope) as record:
            work = asyncio.create_task(self._work(scope, receive, send, record))
            left = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                left.cancel()
                work.cancel()
                await asyncio.wait({work, left})
            if not work.cancelled():
                with contextlib.suppress(ClientDisconnect):
                    work.result()

    async def _work(self, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        async with contextlib.aclosing(self._news(record)) as news:
            try:
                place, first = await anext(news)
                if self._is_stream:
                    await self._stream(place, first, news, send, record)
                    return
                response = await self._at_once(news, record)
            except RapidError as error:
                record.fail()
                if isinstance(error, RequestError):
                    error.param = self._renamed.get(error.param, error.param)
                response = refuse(error)
            await response(scope, receive, send)

    async def _stream(
        self, place: int, first: RequestOutput, news: AsyncIterator[tuple[int, RequestOutput]], send: Send, record: Record
    ) -> None:
        await send(_START)
        await _send(send, self._events.begin() + self._events.piece(place, first))
        try:
            async for place, output in news:
                if piece := self._events.piece(place, output):
                    await _send(send, piece)
            ending = self._events.end(self._in_order)
            record.finish(self._in_order)
        except RapidError as error:
            record.fail()
            ending = self._events.failure(error)
        await _send(send, ending, more=False)

    async def _at_once(self, news: AsyncIterator[tuple[int, RequestOutput]], record: Record) -> Response:
        async for _ in news:
            pass
        record.finish(self._in_order)
        return Response(self._writer.whole(self._in_order), media_type="application/json")

    async def _news(self, record: Record) -> AsyncGenerator[tuple[int, RequestOutput]]:
        async with contextlib.aclosing(merged(self._streams)) as news:
            async for place, output in news:
                if output.error is not None:
                    raise _failed(output.error)
                self._outputs[place] = output
                record.take(place, output)
                yield place, output

    @property
    def _in_order(self) -> list[RequestOutput]:
        return [self._outputs[place] for place in sorted(self._outputs)]


_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # a proxy that holds a stream back makes it pointless
    ],
}


async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
    """Raises ClientDisconnect when the client does not read."""
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": data, "more_body": more})
    except TimeoutError:
        raise ClientDisconnect from None


async def _left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _failed(words: str) -> RapidError:
    if words == EVERY_TOKEN_BANNED:
        return RequestError(words, code="every_token_banned")
    return RefusalError(500, words, code="model_failed")


def event(data: bytes, name: str = "") -> bytes:
    """A server-sent event: JSON that was encoded before, and what kind of event it is."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


DONE = event(b"[DONE]")
"""The end of a stream, in the form of chat and of completions."""
