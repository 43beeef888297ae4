"""Many streams of one server at once, each over a connection of its own, read with next to no work."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engine.traffic import Timed

EVENT = b"data: "


@dataclass
class Streamed:
    """One stream.

    Attributes:
        status: of the answer.
        text: what the events said, put together.
        usage: what the last one counted.
        ended: whether the end was told.
        timed: when events came; each counts as one id until the usage is known.
    """

    status: int = 0
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    timed: Timed = field(default_factory=lambda: Timed(time.perf_counter()))


async def stream(host: str, port: int, ask: dict[str, Any]) -> Streamed:
    """Send a request to /v1/completions and read its stream to the end."""
    reader, writer = await asyncio.open_connection(host, port)
    result = Streamed()
    body = json.dumps({**ask, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        result.status = int((await reader.readline()).split()[1])
        while line := await reader.readline():
            if line.startswith(EVENT):
                _take(result, line.removeprefix(EVENT).strip())
    finally:
        writer.close()
    return result


def _take(result: Streamed, data: bytes) -> None:
    if data == b"[DONE]":
        result.ended = True
        return
    event = json.loads(data)
    result.usage = event.get("usage") or result.usage
    for choice in event.get("choices", ()):
        result.timed.arrivals.append((time.perf_counter(), 1))
        result.text += choice["text"]
