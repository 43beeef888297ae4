"""Several streams read at once."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeVar

_T = TypeVar("_T")


async def merged(streams: Sequence[AsyncGenerator[_T]]) -> AsyncGenerator[tuple[int, _T]]:
    """Yield what each brings as it comes, with the stream's place. Leaving it ends them all."""
    if len(streams) == 1:  # by far the usual case, and a task an item is not for nothing
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    coming = {asyncio.ensure_future(_next(stream)): place for place, stream in enumerate(streams)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = coming.pop(task)
                if (news := task.result()) is not None:
                    yield place, news
                    coming[asyncio.ensure_future(_next(streams[place]))] = place
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncIterator[_T]) -> _T | None:
    return await anext(stream, None)
