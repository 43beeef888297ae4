"""The engine's end of the socket: never waited for while there is a step to run."""

import contextlib
import select
import signal
import socket
import threading
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from rapid_llm.engine.messages import FrameBuffer, FromClient, Message, pack, unpack

_PIECE = 2**18
"""Bytes read between two steps at most: a flood of prompts is taken in over several."""
_M = TypeVar("_M", bound=Message)


class Channel:
    """Messages over a stream socket, read and written as far as that goes without waiting. Leaving the context sends the rest.

    What the client does not take at once waits here. That is bounded by what was asked for: a request's outputs are at most its
    ``max_new_tokens``.

    Attributes:
        is_closed: whether the client's end is closed, so that nothing more comes and nothing said is heard.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.is_closed = False
        self._socket = connection
        connection.setblocking(False)
        connection.set_inheritable(False)
        self._frames = FrameBuffer()
        self._bodies: list[bytes] = []
        self._unsent = bytearray()
        self._lock = threading.Lock()  # start-up reports come from several threads
        self._decoder = msgspec.msgpack.Decoder(FromClient)
        # A handler of signals only sets flags; the byte that each signal writes here ends a wait, so that somebody looks at them.
        self._wakes, self._waking = socket.socketpair()
        self._wakes.setblocking(False)
        self._waking.setblocking(False)
        signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        while self._unsent and not self.is_closed:
            self._sleep()
            self._flush()
        signal.set_wakeup_fd(-1)
        self._wakes.close()
        self._waking.close()

    def send(self, message: Message) -> None:
        """Hand a message to the socket, or keep what it does not take now."""
        frame = pack(message)
        with self._lock:
            self._unsent += frame
            self._flush()

    def receive(self, *, wait: bool) -> Iterator[FromClient]:
        """What the client has said; with ``wait``, sleep until it says something, a signal comes or its end is closed.

        Raises: ProtocolError on what is no message.
        """
        self._read(wait=wait and not self._bodies)
        bodies, self._bodies = self._bodies, []
        return (unpack(body, self._decoder) for body in bodies)

    def wait_for(self, kind: type[_M]) -> _M:
        """The next message, which must be of this kind.

        Raises: ProtocolError when it is another, SystemExit when the client has gone.
        """
        while not self._bodies:
            self._read(wait=True)
            if self.is_closed:
                raise SystemExit(1)
        return unpack(self._bodies.pop(0), msgspec.msgpack.Decoder(kind))

    def _read(self, *, wait: bool) -> None:
        if wait:
            self._sleep()
        with self._lock:
            self._flush()
        try:
            data = self._socket.recv(_PIECE)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self.is_closed |= not data
        self._bodies += self._frames.feed(data)

    def _sleep(self) -> None:
        """Until there is something to read, room for what is unsent, or a signal."""
        events = select.poll()
        events.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        events.register(self._wakes, select.POLLIN)
        events.poll()
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(4096)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except ConnectionError:
            self._unsent.clear()
            self.is_closed = True
