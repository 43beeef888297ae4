"""The client's side of an engine process: starts it, talks to it, and knows at once when it ends. Torch-free."""

import asyncio
import contextlib
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol, cast

import msgspec

from rapid_llm.engine.messages import (
    Abort,
    Add,
    AskStats,
    Drain,
    Draining,
    Failed,
    FrameBuffer,
    FromEngine,
    Hello,
    Message,
    Outputs,
    Progress,
    Ready,
    Refused,
    Shutdown,
    Start,
    Stats,
    check_version,
    pack,
    unpack,
    version,
)
from rapid_llm.engine.request import TokenOutput, TokenRules
from rapid_llm.errors import ConfigError, EngineDiedError, ProtocolError, RapidError

_LAST_LINES = 20
_TAIL_BYTES = 2**14
"""Of what the process wrote that is kept, and the longest line that is waited for."""
_GRACE_S = 1.0
"""How long the socket's end and the process's may lie apart, in seconds, before the process is killed."""
_CLOSING_GRACE_S = 10.0
"""The same when the end was asked for: the step that runs is waited for, and a driver that lets go of its memory."""


class Listener(Protocol):
    """Who follows one request. Called from the event loop, so it must return soon."""

    def take(self, output: TokenOutput) -> bool:
        """One step's share; True when nothing more is wanted."""

    def fail(self, error: RapidError) -> None:
        """The request has ended without an answer."""


class EngineClient:
    """One engine process, from its start to its end; a restart is a new client. Belongs to one event loop.

    On Linux the process dies with the thread that starts it: the event loop's.

    Args:
        command: the program, to which the number of the socket's descriptor is added.
        start: the engine to build.
        on_progress: called with each Progress.
        on_line: called with each line that the process writes; by default it goes to this process's standard error.

    Attributes:
        process_id: of the process; there is none before ``start``.
        error: why the process has ended; None while it lives.
    """

    def __init__(
        self,
        command: Sequence[str],
        start: Start,
        on_progress: Callable[[Progress], None],
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self._command, self._start, self._on_progress = command, start, on_progress
        self._on_line = on_line or _to_stderr
        self.error: RapidError | None = None
        self.process_id = 0
        self._listeners: dict[str, Listener] = {}
        self._numbers = count()
        self._asked: deque[tuple[asyncio.Future[Stats], float]] = deque()  # with the time of each
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(_seen)
        self._reason: RapidError | None = None
        self._closing = False
        self._tail = b""

    async def start(self) -> None:
        """Start the process and say hello; it is not waited for."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._connection = _Connection(self._receive, self._broken)
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(theirs.fileno()),
                    stdin=DEVNULL,
                    stdout=PIPE,
                    stderr=STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C in a terminal is this process's to handle
                )
            await asyncio.get_running_loop().create_unix_connection(lambda: self._connection, sock=ours)
        except BaseException:
            ours.close()  # by which the process ends, if there is one
            raise
        self.process_id = self._process.pid
        self._send(Hello(version()))
        self._send(self._start)
        self._end = asyncio.create_task(self._follow(self._process), name="engine process")

    async def ready(self) -> Ready:
        """Wait until requests are served; the engine's sizes and what its start went to.

        Raises: what the start ended with; EngineDiedError when the process ended without a word.
        """
        return await asyncio.shield(self._ready)

    def add(self, token_ids: list[int], rules: TokenRules, listener: Listener) -> str:
        """Send a request; the id to abort it by, which is never used again, so that no late output meets another request.

        Raises: EngineDiedError when the process has ended.
        """
        if self.error is not None:
            raise self.error
        request_id = str(next(self._numbers))
        self._listeners[request_id] = listener
        self._send(Add(request_id, token_ids, rules))
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request; its listener hears nothing more. No error when it has ended."""
        if self._listeners.pop(request_id, None) is not None:
            self._send(Abort(request_id))

    async def stats(self) -> Stats:
        """The engine as it is between two steps.

        Raises: EngineDiedError when the process ends before it answers.
        """
        if self.error is not None:
            raise self.error
        return await self._ask()

    def silence(self) -> float:
        """Seconds for which the engine has owed an answer about itself: what the step that runs has taken, or more.

        Asks it, unless it owes one.
        """
        if not self._asked and self.error is None:
            self._ask().add_done_callback(_seen)
        return time.monotonic() - self._asked[0][1] if self._asked else 0.0

    def _ask(self) -> "asyncio.Future[Stats]":
        answer: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._asked.append((answer, time.monotonic()))
        self._send(AskStats())
        return answer

    async def ended(self) -> RapidError:
        """Wait until the process has ended; why it did."""
        await asyncio.shield(self._end)
        return cast("RapidError", self.error)

    async def drain(self) -> None:
        """Take no more requests, let those that run end, and wait for the process's end."""
        await self._part(Drain())
        await asyncio.shield(self._end)

    async def close(self) -> None:
        """End the process: after the step that runs, or by force where that takes longer than ten seconds."""
        await self._part(Shutdown())
        done, _ = await asyncio.wait({self._end}, timeout=_CLOSING_GRACE_S)
        if not done:
            self._kill()
            await asyncio.shield(self._end)

    async def _part(self, message: Message) -> None:
        self._closing = True
        self._send(message)

    def _send(self, message: Message) -> None:
        if self.error is None:
            self._connection.send(message)

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    self._give(output)
            case Refused(request_id):
                if (listener := self._listeners.pop(request_id, None)) is not None:
                    listener.fail(message.error())
            case Progress():
                self._on_progress(message)
            case Ready():
                self._ready.set_result(message)
            case Stats():
                answer, _ = self._asked.popleft()
                if not answer.done():
                    answer.set_result(message)
            case Draining():
                self._closing = True
            case Failed(fault):
                self._reason = fault.error()
            case Hello(theirs):
                check_version(theirs)

    def _give(self, output: TokenOutput) -> None:
        listener = self._listeners.get(output.request_id)
        if listener is None:  # aborted while this was on its way
            return
        if output.finish_reason is not None:
            del self._listeners[output.request_id]
        if listener.take(output):
            self.abort(output.request_id)

    def _broken(self, error: RapidError) -> None:
        """What the process says cannot be read, so it is of no use any more."""
        self._reason = error
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _follow(self, process: Process) -> None:
        """Wait for the end of the process, whichever sign of it comes first, and tell everybody."""
        exited = asyncio.create_task(process.wait())
        said = asyncio.create_task(self._read_stderr(cast("asyncio.StreamReader", process.stdout)))
        ends: set[asyncio.Future[Any]] = {exited, self._connection.closed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({*ends, said}, timeout=_CLOSING_GRACE_S if self._closing else _GRACE_S)
        if process.returncode is None:
            self._kill()
            await asyncio.wait({exited, said}, timeout=_GRACE_S)
        said.cancel()  # a child of the process may still hold its stderr
        exited.cancel()
        self._connection.close()
        self._tell(self._why(process.returncode))

    def _why(self, exit_code: int | None) -> RapidError:
        """A start that failed says why itself; after it, an end is an end."""
        if self._reason is not None and not self._ready.done():
            return self._reason
        lines = self._tail.decode("utf-8", "replace").splitlines()
        reason = [] if self._reason is None else [str(self._reason)]
        return EngineDiedError(exit_code, (lines + reason)[-_LAST_LINES:])

    def _tell(self, error: RapidError) -> None:
        self.error = error
        waiting: list[asyncio.Future[Any]] = [self._ready, *(answer for answer, _ in self._asked)]
        self._asked.clear()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(error)
        listeners, self._listeners = list(self._listeners.values()), {}
        for listener in listeners:
            listener.fail(error)

    async def _read_stderr(self, stream: asyncio.StreamReader) -> None:
        """Pass on what the process says, and keep the end of it."""
        rest = b""
        try:
            while data := await stream.read(4096):
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _TAIL_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._on_line(line.decode("utf-8", "replace"))
        finally:
            if rest:
                self._on_line(rest.decode("utf-8", "replace"))


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _seen(answer: "asyncio.Future[Any]") -> None:
    """Nobody need have waited for it, so what it ended with is no error that was lost."""
    if not answer.cancelled():
        answer.exception()


class _Connection(asyncio.Protocol):
    """The client's end of the socket."""

    def __init__(self, receive: Callable[[FromEngine], None], broken: Callable[[RapidError], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receive, self._broken = receive, broken
        self._frames, self._is_broken = FrameBuffer(), False
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._is_broken:  # what comes until the process has ended: a version that was refused may say that it is ready
            return
        try:
            for body in self._frames.feed(data):
                self._receive(unpack(body, self._decoder))
        except (ProtocolError, ConfigError) as error:
            self._is_broken = True
            self._broken(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, message: Message) -> None:
        self._transport.write(pack(message))

    def close(self) -> None:
        self._transport.abort()
