"""One HTTP/1.1 connection: requests one after another, whose answers are handed on in the very call that brings their bytes.

No task is woken for a part of an answer, so that one core follows a thousand streams and a part's time is that of its arrival.
"""

import asyncio
from typing import Protocol

import httptools


class Reader(Protocol):
    """Who takes an answer."""

    def begin(self, status: int, content_type: str) -> None:
        """Its head has come."""

    def feed(self, data: bytes) -> None:
        """A part of its body has come."""


class Connection(asyncio.Protocol):
    """Made by an event loop's ``create_connection``.

    Attributes:
        is_open: whether another request can be sent: none runs, and neither side has closed it.
        num_bytes: bytes that have come of the answer that runs, or ran last.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._reader: Reader | None = None
        self._done: asyncio.Future[None] | None = None
        self.is_open, self.num_bytes = False, 0
        self._headers: dict[bytes, bytes] = {}
        self._ends_with_connection = False

    async def ask(self, request: bytes, reader: Reader) -> None:
        """Send a request, and return once its answer is whole.

        Raises: ConnectionError when the connection ends before, or what comes is no HTTP.
        """
        self.num_bytes = 0
        if not self.is_open:
            raise ConnectionResetError("the server has closed the connection")
        self._reader, self._done = reader, asyncio.get_running_loop().create_future()
        self.is_open = self._ends_with_connection = False
        self._headers.clear()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it at once."""
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is open."""
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        self.num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self._end(cause or ConnectionError(f"what the server sends is no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side has closed it, or we have."""
        self.is_open = False
        if self._ends_with_connection and exc is None:
            self._end(None)
        else:
            self._end(ConnectionResetError(f"the connection broke off{f': {exc}' if exc else ''}"))

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """All headers."""
        status = self._parser.get_status_code()
        if status >= 200 and self._reader is not None:
            self._ends_with_connection = not {b"content-length", b"transfer-encoding"} & self._headers.keys()
            self._reader.begin(status, self._headers.get(b"content-type", b"").decode("latin-1"))

    def on_body(self, body: bytes) -> None:
        """A part of the body, without the marks of chunks."""
        if self._reader is not None:
            self._reader.feed(body)

    def on_message_complete(self) -> None:
        """The end of an answer; of an interim one (100 Continue, 103 Early Hints) the real one follows."""
        if self._parser.get_status_code() >= 200:
            self.is_open = self._parser.should_keep_alive() and not self._transport.is_closing()
            self._end(None)
        self._headers.clear()

    def _end(self, error: BaseException | None) -> None:
        done, self._done, self._reader = self._done, None, None
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
