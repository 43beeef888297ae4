"""The engine's own process: one loop that runs steps and, between two of them, reads and writes what the socket takes at once.

No second thread reads or writes: handing over Python's lock would cost a step more than both do.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rapid_llm.engine.channel import Channel
from rapid_llm.engine.engine import Engine
from rapid_llm.engine.messages import (
    STEP_BOUNDS,
    Abort,
    Add,
    AskStats,
    Drain,
    Draining,
    Failed,
    Fault,
    FromClient,
    Hello,
    Outputs,
    Progress,
    Ready,
    Refused,
    Shutdown,
    Start,
    Stats,
    check_version,
    version,
)
from rapid_llm.engine.request import Request
from rapid_llm.errors import RapidError, RequestError
from rapid_llm.ledger import StartupLedger

Report = Callable[[str, int, int], None]
"""Told of start-up: phase, bytes done, bytes in all (both 0 where bytes say nothing)."""
Build = Callable[[Start, StartupLedger, Report], Engine]

_PR_SET_PDEATHSIG = 1
_LOOKS_PER_SECOND = 2


def serve(connection: socket.socket, build: Build) -> int:
    """Be the engine process of the client at the other end of ``connection``; return the exit status.

    Dies with its client, whatever it is doing. SIGTERM drains (no new requests, running ones end, status 0) and a second one
    ends it at once; SIGINT, which a terminal sends to everybody, is the client's to handle.

    Args:
        connection: a connected stream socket; the messages over it are those of messages.py.
        build: makes the engine that Start describes, telling how far it is.
    """
    _end_with_client(connection)
    with connection, Channel(connection) as channel:
        process = EngineProcess(channel, build)
        try:
            process.run()
        except RapidError as error:
            channel.send(Failed(Fault.of(error)))
            if process.is_ready:  # nothing that a user did, so it ends like any other crash
                raise
            return 2
    return 0


class EngineProcess:
    """The loop and what it answers."""

    def __init__(self, channel: Channel, build: Build) -> None:
        self._channel, self._build = channel, build
        self._engine: Engine | None = None
        self._draining = self._told = self._done = False
        self._steps, self._num_generated = StepClock(), 0
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    def run(self) -> None:
        """From the first message to the last.

        Raises:
            RapidError: a start that cannot be, or a client that says what is no message.
        """
        self._channel.send(Hello(version()))
        check_version(self._channel.wait_for(Hello).version)
        start = self._channel.wait_for(Start)
        ledger = _ReportedLedger(self._report)
        self._engine = self._build(start, ledger, self._report)
        with ledger.phase("explain kernels"):
            kernels = self._engine.served_kernels()
        self._channel.send(Ready(self._engine.config, ledger.zero, ledger.phases, ledger.notes, kernels))
        self._loop(self._engine)

    def _loop(self, engine: Engine) -> None:
        while not self._done:
            for message in self._channel.receive(wait=not engine.has_work):
                self._take(engine, message)
            if self._draining and not self._told:
                self._channel.send(Draining())
                self._told = True
            if engine.has_work:
                self._step(engine)
            self._done |= self._channel.is_closed or (self._draining and not engine.has_work)

    def _step(self, engine: Engine) -> None:
        with self._steps:
            outputs = engine.step()
        self._num_generated += sum(output.token is not None for output in outputs)
        while engine.refused:
            request_id, error = engine.refused.popitem()
            self._channel.send(Refused.of(request_id, error))
        if outputs:
            self._channel.send(Outputs(outputs))

    def _take(self, engine: Engine, message: FromClient) -> None:
        match message:
            case Add():
                self._add(engine, message)
            case Abort(request_id):
                engine.abort(request_id)
            case AskStats():
                self._channel.send(self._stats(engine))
            case Drain():
                self._draining = True
            case Shutdown():
                self._done = True

    def _add(self, engine: Engine, message: Add) -> None:
        try:
            if self._draining:
                change = "send it to another engine, or again after a restart"
                raise RequestError("the engine takes no more requests", got="a request after a drain began", change=change)
            engine.add(Request(message.request_id, message.token_ids, message.rules))
        except RequestError as error:
            self._channel.send(Refused.of(message.request_id, error))

    def _stats(self, engine: Engine) -> Stats:
        scheduler, steps, num_pages = engine.scheduler, self._steps, engine.config.num_pages
        return Stats(
            waiting=engine.num_waiting,
            running=len(scheduler.running),
            used_pages=num_pages - scheduler.allocator.num_free,
            num_pages=num_pages,
            num_steps=sum(steps.counts),
            step_seconds=steps.last,
            step_counts=steps.counts,
            total_step_seconds=steps.total,
            num_preemptions=scheduler.num_preemptions,
            admitted_tokens=scheduler.pages.num_admitted_tokens,
            cached_tokens=scheduler.pages.num_cached_tokens,
            num_compiles=engine.worker.num_compiles,
            generated_tokens=self._num_generated,
        )

    def _report(self, phase: str, done: int = 0, total: int = 0) -> None:
        self._channel.send(Progress(phase, done, total))

    def _on_sigterm(self, *_: object) -> None:
        # The second one needs no Python to act, so that no step that hangs holds it up.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._draining = True
        if not self.is_ready:  # nothing runs yet
            os._exit(0)


class StepClock:
    """Times steps on the host: what is run inside the context is one.

    Attributes:
        last, total: seconds of the newest one, and of all.
        counts: how many took up to each of STEP_BOUNDS, then longer.
    """

    def __init__(self) -> None:
        self.last = self.total = 0.0
        self.counts = [0] * (len(STEP_BOUNDS) + 1)

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.last = time.perf_counter() - self._began
        self.total += self.last
        self.counts[bisect_left(STEP_BOUNDS, self.last)] += 1


class _ReportedLedger(StartupLedger):
    """Tells of each phase as it begins."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._report(name, 0, 0)
        with super().phase(name):
            yield


def _end_with_client(connection: socket.socket) -> None:
    """See to it that this process never outlives its client, even in a step that hangs or in the middle of loading.

    On Linux the kernel kills it with the thread that started it. Everywhere a thread sleeps until the client's end of the socket
    is closed, and looks now and then whether this process has another parent: a fork of the client may keep that end open.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    watch = threading.Thread(target=_wait_for_end, args=(connection.fileno(), os.getppid()), name="client's end", daemon=True)
    watch.start()


def _wait_for_end(descriptor: int, parent: int) -> None:
    hang_up = select.poll()
    hang_up.register(descriptor, 0)  # no event but the hang-up, which is always told
    while not hang_up.poll(1000 // _LOOKS_PER_SECOND) and os.getppid() == parent:
        pass
    os._exit(1)
