"""What all endpoints share: the engine and its supervisor, the places for open requests, the counts, the settings."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

from rapid_llm.config import EngineConfig
from rapid_llm.entrypoints.protocol.models import Readiness
from rapid_llm.entrypoints.server.metrics import Metrics
from rapid_llm.entrypoints.server.refusals import RefusalError
from rapid_llm.entrypoints.server.settings import ServerConfig
from rapid_llm.entrypoints.start_progress import StartProgress, amount
from rapid_llm.errors import RapidError

if TYPE_CHECKING:
    from rapid_llm.engine.messages import Stats
    from rapid_llm.entrypoints.async_llm import AsyncLLM
    from rapid_llm.entrypoints.supervisor import Supervisor

logger = logging.getLogger(__name__)
_engine_logger = logging.getLogger("rapid_llm.engine")
EMBEDDED = "SmolLM2-135M-Instruct"
STUCK_SECONDS = 120.0
"""A step that takes longer hangs."""
STATS_SECONDS = 2.0
"""How long whoever asks for counts waits for a step to end."""
_RETRY_SECONDS = 1.0


class Serving:
    """One model and who is served by it.

    Args:
        engine, config: the settings.
        on_end: called when no engine will be started any more, with why.

    Attributes:
        model: what the model is called.
        created: Unix time of the start, in seconds.
        metrics: the counts.
        num_open: places that are taken.
    """

    def __init__(self, engine: EngineConfig, config: ServerConfig, on_end: Callable[[RapidError], None]) -> None:
        self.engine, self.config = engine, config
        self.model = config.served_model_name or (PurePath(engine.model).name if engine.model else EMBEDDED)
        self.created = int(time.time())
        self.metrics = Metrics()
        self.num_open = 0
        self._on_end = on_end
        self._supervisor: Supervisor | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to start the engine."""
        self._running = asyncio.create_task(self._run(), name="engine")

    async def close(self) -> None:
        """End the engine."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        if self._supervisor is not None:
            await self._supervisor.close()

    def readiness(self) -> Readiness:
        """How far the engine is."""
        if self._supervisor is None:
            return Readiness(status="starting", phase="start server")
        state, progress = self._supervisor.state, self._supervisor.llm.progress
        if state == "ready":
            return Readiness(status=state)
        if progress is None:
            return Readiness(status=state, phase="start engine process")
        return Readiness(status=state, phase=progress.phase, done=progress.done, total=progress.total)

    def stuck_seconds(self) -> float:
        """How long the step that runs has taken, where that is too long for a step; else 0."""
        if self._supervisor is None or self._supervisor.state != "ready":
            return 0.0
        silence = self._supervisor.llm.silence()
        return silence if silence > STUCK_SECONDS else 0.0

    async def stats(self) -> "Stats | None":
        """The engine's counts between two steps; None while none is ready, or while a step takes too long."""
        try:
            async with asyncio.timeout(STATS_SECONDS):
                return await self.llm().stats()
        except (RapidError, TimeoutError):
            return None

    @property
    def newest_llm(self) -> "AsyncLLM | None":
        """The engine, ready or not; None before there is one."""
        return None if self._supervisor is None else self._supervisor.llm

    @property
    def num_restarts(self) -> int:
        """Times that the engine was started again."""
        return 0 if self._supervisor is None else self._supervisor.num_restarts

    def llm(self, model: str | None = None) -> "AsyncLLM":
        """The engine.

        Args:
            model: the one that a request names; None names none.

        Raises: RefusalError while no engine is ready (503), and when the model is another (404).
        """
        if self._supervisor is None or self._supervisor.state != "ready":
            raise self._not_ready()
        if model is not None and model != self.model:
            wanted, change, code = repr(self.model), "name it, or leave model out", "model_not_found"
            raise RefusalError(404, "unknown model", code=code, param="model", got=repr(model), wanted=wanted, change=change)
        return self._supervisor.llm

    @contextlib.contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold places for so many answers.

        Raises: RefusalError when fewer are free.
        """
        most = self.config.max_requests
        if self.num_open + count > most:
            problem, code, change = "too many requests are open", "too_many_requests", "send it again later"
            got, wanted = f"{count} more beside {self.num_open}", f"at most {most}"
            raise RefusalError(429, problem, code=code, retry_after=_RETRY_SECONDS, got=got, wanted=wanted, change=change)
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count

    def _not_ready(self) -> RefusalError:
        now = self.readiness()
        phase = f"{now.phase}, {amount(now.phase, now.done, now.total)}" if now.total else now.phase
        got = f"{now.status}: {phase}" if phase else now.status
        problem, code, change = "the engine is not ready", f"engine_{now.status}", "send it again later; GET /ready tells when"
        return RefusalError(503, problem, code=code, retry_after=_RETRY_SECONDS, got=got, change=change)

    async def _run(self) -> None:
        try:
            llm = await asyncio.to_thread(self._make)  # what it imports takes a tenth of a second
            await self._supervise(llm)
        except RapidError as error:
            logger.error("%s", error)
            self._on_end(error)

    def _make(self) -> "AsyncLLM":
        from rapid_llm.entrypoints.async_llm import AsyncLLM

        show = StartProgress(logger.info).note if self.config.progress else _show_nothing
        return AsyncLLM(
            **vars(self.engine),
            progress=lambda news: show(news.phase, news.done, news.total),
            download_progress=lambda *so_far: show("download", *so_far),
            on_line=_engine_logger.warning,  # what is worth a line there is worth a warning
        )

    async def _supervise(self, llm: "AsyncLLM") -> None:
        from rapid_llm.entrypoints.supervisor import Supervisor

        self._supervisor = Supervisor(llm, self.config.max_restarts)
        await self._supervisor.run()


def _show_nothing(phase: str, done: int, total: int, seconds: float | None = None) -> None:
    """Nobody wants to see it."""
