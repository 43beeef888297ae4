"""A client of one OpenAI-compatible URL that opens as many connections as it has open requests, and uses them again."""

import asyncio
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rapid_llm.entrypoints.bench.connection import Connection
from rapid_llm.entrypoints.bench.events import EventReader
from rapid_llm.entrypoints.bench.streamed import Streamed
from rapid_llm.errors import ConfigError
from rapid_llm.version import __version__


class Client:
    """Use it within one event loop, and ``close`` it at the end.

    Args:
        url: of the API, such as http://127.0.0.1:8000/v1. Environment variables for proxies are not followed.
        api_key: sent with each request; empty sends none.

    Raises: ConfigError on a URL that is none.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        self._host, self._port, self._path, is_https = _parts(url)
        self._tls = ssl.create_default_context() if is_https else None
        host = f"[{self._host}]" if ":" in self._host else self._host
        shown = host if self._port == (443 if is_https else 80) else f"{host}:{self._port}"
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {shown}\r\nUser-Agent: rapid-llm/{__version__}\r\nAccept: */*\r\n{key}"
        self._idle: list[Connection] = []

    async def stream(self, path: str, ask: dict[str, Any], *, keeps_text: bool = False) -> Streamed:
        """Send a request that asks for a stream, and read it to its end. What goes wrong is the ``error`` of what is returned.

        Args:
            path: behind the URL, such as /completions.
            ask: the body.
            keeps_text: whether the text is kept.
        """
        request, streamed = self.asking(path, ask), Streamed(time.perf_counter())
        await self.follow(request, streamed, keeps_text=keeps_text)
        return streamed

    def asking(self, path: str, ask: dict[str, Any]) -> bytes:
        """A request for a stream that ends with counts of tokens, unless the body ``ask`` says otherwise."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return self._request("POST", path, msgspec.json.encode({**options, **ask}))

    async def follow(self, request: bytes, streamed: Streamed, *, keeps_text: bool = False) -> None:
        """Send a request that ``asking`` made, and fill ``streamed`` in."""
        reader = EventReader(streamed, keeps_text=keeps_text)
        try:
            await self._ask(request, reader)
        except OSError as error:
            streamed.ended, streamed.error = time.perf_counter(), str(error) or type(error).__name__
        else:
            reader.end()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of what is there.

        Raises: OSError when there is no answer.
        """
        whole = _Whole()
        await self._ask(self._request("GET", path), whole)
        return whole.status, bytes(whole.body)

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().close()

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        return f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{length}\r\n".encode() + body

    async def _ask(self, request: bytes, reader: "EventReader | _Whole") -> None:
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._through(connection, request, reader)
            except ConnectionError:
                if connection.num_bytes:  # else the server closed it while it was idle: that is nobody's error
                    raise
        loop = asyncio.get_running_loop()
        name = self._host if self._tls else None
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls, server_hostname=name)
        await self._through(connection, request, reader)
        return None

    async def _through(self, connection: Connection, request: bytes, reader: "EventReader | _Whole") -> None:
        await connection.ask(request, reader)
        if connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()


class _Whole:
    """An answer that is read at once."""

    def __init__(self) -> None:
        self.status, self.body = 0, bytearray()

    def begin(self, status: int, content_type: str) -> None:
        self.status = status

    def feed(self, data: bytes) -> None:
        self.body += data


def _parts(url: str) -> tuple[str, int, str, bool]:
    """Host, port, path without a slash at its end, and whether it is https."""
    wanted, change = "http://HOST:PORT/v1, or https", "correct it"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the URL cannot be read ({error})", got=url, wanted=wanted, change=change) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ConfigError("the URL is no address of an API", got=url, wanted=wanted, change=change)
    is_https = parts.scheme == "https"
    return parts.hostname, port or (443 if is_https else 80), parts.path.rstrip("/"), is_https
