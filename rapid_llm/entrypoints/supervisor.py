"""Keeps an AsyncLLM serving: proves that it is ready, and starts another engine where one has died."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Literal

from rapid_llm.config import SamplingParams
from rapid_llm.entrypoints.async_llm import AsyncLLM
from rapid_llm.errors import RapidError

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "failed", "closed"]
WINDOW_SECONDS = 600.0
"""Deaths count together that lie no further apart."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
_PROOF = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Supervisor:
    """Use it as ``task = asyncio.create_task(Supervisor(llm).run())`` beside the streams of ``llm``, and ``close`` at the end.

    Args:
        llm: not started yet.
        max_restarts: times that an engine is started again within WINDOW_SECONDS, with a pause that doubles each time.
        sleep: waits for so many seconds.

    Attributes:
        error: why the engine died last, or could not start; None before.
        num_restarts: so far.
    """

    def __init__(self, llm: AsyncLLM, max_restarts: int = 5, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.llm, self.max_restarts = llm, max_restarts
        self._state: State = "starting"
        self.error: RapidError | None = None
        self.num_restarts = 0
        self._deaths: deque[float] = deque()
        self._sleep = sleep

    @property
    def state(self) -> State:
        """One of "starting", "ready" (it has produced a token), "restarting", "failed" (no more is tried), "closed"."""
        return "restarting" if self._state == "ready" and self.llm.has_ended else self._state

    async def run(self) -> None:
        """Start the engine and keep it running until ``close``.

        Raises: what the first start was refused for; EngineDiedError when it died too often.
        """
        try:
            await self.llm.start()
            await self._prove()
            while True:
                await self._follow()
        except RapidError as error:
            self._state, self.error = "failed", error
            raise

    async def close(self) -> None:
        """End the engine. ``run`` is to be cancelled before."""
        self._state = "closed"
        await self.llm.close()

    async def _follow(self) -> None:
        """From ready to the engine's end, and to ready again."""
        error: RapidError = await self.llm.ended()
        self._state, self.llm.progress = "restarting", None
        while True:
            await self._pause(error)
            try:
                await self.llm.restart()
                return await self._prove()
            except RapidError as again:
                error = again

    async def _prove(self) -> None:
        """Wait until the engine has produced a token."""
        await self.llm.ready()
        [_ async for _ in self.llm.generate([0], _PROOF)]
        self._state = "ready"
        logger.info("ready: the first token came %.2f s after the start", self.llm.ledger.first_token or 0.0)

    async def _pause(self, error: RapidError) -> None:
        """Note a death and wait, longer each time. Raises it when there were too many."""
        self.error, now = error, time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > WINDOW_SECONDS:
            self._deaths.popleft()
        if len(self._deaths) > self.max_restarts:
            raise error
        self.num_restarts += 1
        seconds = min(_FIRST_PAUSE * 2 ** (len(self._deaths) - 1), _LONGEST_PAUSE)
        logger.error("the engine has ended and is started again in %.2f s: %s", seconds, error)
        await self._sleep(seconds)
