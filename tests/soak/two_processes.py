"""An engine in its own process under clients of every manner: slow, cancelled, gone, aborted by name."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from rapid_llm import AsyncLLM, RequestError, SamplingParams
from rapid_llm.engine.output import RequestOutput
from tests.soak.leftovers import check_none_left, living
from tests.soak.traffic import ALL_BANNED, AT_ONCE, CANARY, CANARY_PARAMS, LONG, OPTIONS, REFUSED, Reading, prompt, values

PATIENCE = 120.0
"""Seconds after which one that has not ended is called lost; nothing waits for it to pass."""


@dataclass
class Client:
    """One request: its own noise, so that it asks the same whatever the others do."""

    llm: AsyncLLM
    draw: random.Random
    name: str
    canary: str

    async def answered(self) -> None:
        """Read to the end."""
        await self._whole(prompt(self.draw), values(self.draw))

    async def slow(self) -> None:
        """Busy for some turns of the loop after each item."""
        await self._whole(prompt(self.draw), values(self.draw), turns=40)

    async def canaries(self) -> None:
        """What has always been said."""
        text = await canary_text(self.llm)
        if text != self.canary:
            raise AssertionError(f"the canary's text has changed: {text!r} was {self.canary!r}")

    async def all_banned(self) -> None:
        """An error of its own."""
        await self._whole("x", ALL_BANNED, "error")

    async def left(self) -> None:
        """Leave after an item or two; the stream is closed, or it is for the event loop to close."""
        outputs, most = ask(self.llm, prompt(self.draw), LONG, self.name), self.draw.randint(1, 2)
        if self.draw.random() < 0.5:
            async with aclosing(outputs):
                await _some(outputs, most)
        else:
            await _some(outputs, most)

    async def cancelled(self) -> None:
        """The reader's task is cancelled, sometimes before it has begun and sometimes too late."""
        task = asyncio.create_task(self.answered())
        await _turns(self.draw.randrange(60))
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()

    async def aborted(self) -> None:
        """Ended by name, while it is encoded, queued or running; its stream says so."""
        wanted = self.draw.choice((LONG, SamplingParams(max_tokens=70, ignore_eos=True, n=3)))
        task = asyncio.create_task(self._whole(prompt(self.draw), wanted, "abort"))
        await _turns(self.draw.randint(1, 8))
        self.llm.abort(self.name)
        await task

    async def refused(self) -> None:
        """Something that cannot be served, or a name that is in use."""
        async with aclosing(self.llm.generate("x", LONG, self.name)) as other:
            await _refuse(lambda: ask(self.llm, *self.draw.choice(REFUSED)(), None))
            await anext(other)
            await _refuse(lambda: ask(self.llm, "x", LONG, self.name))

    async def _whole(self, what: str | list, wanted: SamplingParams, *reasons: str, turns: int = 0) -> None:
        reading = Reading(wanted)
        async for output in ask(self.llm, what, wanted, self.name):
            reading.take(output)
            await _turns(turns)
        reading.ended(*(reasons or ("stop", "length")))


MANNERS: dict[Callable[[Client], Awaitable[None]], int] = {
    Client.answered: 12,
    Client.slow: 2,
    Client.canaries: 1,
    Client.all_banned: 1,
    Client.left: 2,
    Client.cancelled: 2,
    Client.aborted: 2,
    Client.refused: 1,
}


async def run(folder: str, requests: int, seed: int, patience: float = PATIENCE) -> Counter:
    """AT_ONCE clients at a time; how each ended. Raises AssertionError where anything is lost, changed or left behind."""
    before, ends = living(), Counter()
    async with AsyncLLM(folder, device="cpu", **OPTIONS) as llm:
        await _talk(llm, requests, seed, ends, patience)
        await canary_text(llm)  # by its end the event loop has closed what was left to it
        stats, streams = await llm.stats(), len(llm._open) + len(llm._client()._listeners)
    if sum(ends.values()) != requests:
        raise AssertionError(f"not every request ended once: {dict(ends)} of {requests}")
    if (stats.waiting, stats.running, stats.used_pages, streams) != (0, 0, 0, 0):
        raise AssertionError(f"something is left behind: {stats}, {streams} streams")
    check_none_left(before)
    return ends


async def _talk(llm: AsyncLLM, requests: int, seed: int, ends: Counter, patience: float) -> None:
    canary, numbers = await canary_text(llm), iter(range(requests))

    async def ask_on() -> None:
        for number in numbers:
            draw = random.Random(f"two processes {seed}/{number}")
            [manner] = draw.choices(list(MANNERS), list(MANNERS.values()))
            async with asyncio.timeout(patience):
                await manner(Client(llm, draw, f"request {number}", canary))
            ends[manner.__name__] += 1

    async with asyncio.TaskGroup() as clients:
        for _ in range(AT_ONCE):
            clients.create_task(ask_on())


def ask(llm: AsyncLLM, what: object, wanted: SamplingParams, name: str | None) -> AsyncIterator[RequestOutput]:
    """A conversation is a list of messages; anything else is a prompt."""
    is_chat = isinstance(what, list) and what and isinstance(what[0], dict)
    return llm.chat(what, wanted, request_id=name) if is_chat else llm.generate(what, wanted, request_id=name)


async def canary_text(llm: AsyncLLM) -> str:
    """What the canary says."""
    return [output async for output in llm.generate(CANARY, CANARY_PARAMS)][-1].outputs[0].text


async def _some(outputs: AsyncIterator[RequestOutput], most: int) -> None:
    async for _ in outputs:
        most -= 1
        if most == 0:
            return


async def _refuse(asking: Callable[[], AsyncIterator[RequestOutput]]) -> None:
    try:
        async for _ in asking():
            raise AssertionError("what cannot be served was")
    except RequestError:
        return
    raise AssertionError("what cannot be served was neither answered nor refused")


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
