"""One server from its first byte to its last: the port is open before anything is loaded, and SIGTERM lets open answers end."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Iterator

import uvicorn
import uvloop

from rapid_llm.config import EngineConfig
from rapid_llm.entrypoints.server.app import build_app
from rapid_llm.entrypoints.server.head import BoundedHead
from rapid_llm.entrypoints.server.logs import log_as_json
from rapid_llm.entrypoints.server.settings import ServerConfig
from rapid_llm.errors import RapidError

logger = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(engine: EngineConfig, config: ServerConfig, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; a second one does not wait for open answers.

    Raises: what the engine ended with, when it cannot start or died too often.
    """
    log_as_json()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        error = runner.run(_serve(engine, config, listener))
    if error is not None:
        raise error


async def _serve(engine: EngineConfig, config: ServerConfig, listener: socket.socket) -> RapidError | None:
    ends: list[RapidError] = []

    def on_end(error: RapidError) -> None:
        ends.append(error)
        server.should_exit = True

    settings = uvicorn.Config(
        build_app(engine, config, on_end),
        http=BoundedHead,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(config.drain_seconds),
    )
    server = _Server(settings)
    host, port = listener.getsockname()[:2]
    logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    await server.serve([listener])
    logger.info("ended")
    return ends[0] if ends else None


class _Server(uvicorn.Server):
    """uvicorn raises a signal again once it has ended, which makes a clean end look like a crash."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:  # what is still waited for then, a download that nobody can stop say, one more signal ends
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _end(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        logger.info("ending at once" if self.force_exit else "draining: open answers end, no new ones begin")
