"""What a client and its engine process say to each other: typed messages in msgpack, each behind its length. No pickle.

What the token half knows anyway (TokenRules, TokenOutput, the configs) travels as it is. Every message but two belongs to one
version: Hello and Failed keep their form for ever, so that processes of two versions can still tell each other so.
"""

import hashlib
import struct
from collections.abc import Iterator
from functools import cache
from typing import TypeVar

import msgspec

from rapid_llm.config import EngineConfig, ResolvedConfig
from rapid_llm.engine.request import TokenOutput, TokenRules
from rapid_llm.errors import (
    CheckpointError,
    ConfigError,
    KernelInputError,
    NoKernelError,
    ProtocolError,
    RapidError,
    RequestError,
)
from rapid_llm.kernels.dispatcher.served_kernel import ServedKernel
from rapid_llm.ledger import Phase
from rapid_llm.version import __version__

MAX_FRAME = 64 * 2**20
"""Bytes of the longest message: ten times a prompt of a million ids. A larger length is no length."""

STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds that steps are counted by."""

_LENGTH = struct.Struct("<I")
_ERRORS = {kind.__name__: kind for kind in (CheckpointError, ConfigError, KernelInputError, NoKernelError, RequestError)}


class Message(msgspec.Struct, frozen=True, array_like=True, tag=str.lower, forbid_unknown_fields=True):
    """Any of them: an array of its tag and its fields in their order."""


class Hello(Message, frozen=True):
    """The first message of each side. Keeps its form."""

    version: str


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """A RapidError on its way: the name of its class and its parts."""

    kind: str
    problem: str
    got: str = ""
    wanted: str = ""
    change: str = ""

    @classmethod
    def of(cls, error: RapidError) -> "Fault":
        """The parts of ``error``."""
        return cls(type(error).__name__, error.problem, error.got, error.wanted, error.change)

    def error(self) -> RapidError:
        """The error as it was raised."""
        kind = _ERRORS.get(self.kind, ProtocolError)
        return kind(self.problem, got=self.got, wanted=self.wanted, change=self.change)


class Failed(Message, frozen=True):
    """The engine cannot start or go on; its process ends after this. Keeps its form."""

    fault: Fault


class Start(Message, frozen=True):
    """Build an engine. One process drives one device: the one that ``config.device`` names.

    Attributes:
        config: the user's wishes.
        path: where the model lies on this disk.
    """

    config: EngineConfig
    path: str


class Add(Message, frozen=True):
    """A new request under an id that this client has not used before."""

    request_id: str
    token_ids: list[int]
    rules: TokenRules


class Abort(Message, frozen=True):
    """Nothing more of this request is wanted. No error when it has ended meanwhile."""

    request_id: str


class AskStats(Message, frozen=True):
    """Answered by Stats, in order, between two steps."""


class Drain(Message, frozen=True):
    """Take no more requests, end those that run, then exit; as SIGTERM does."""


class Shutdown(Message, frozen=True):
    """Exit after the step that runs."""


class Progress(Message, frozen=True):
    """A start-up phase has begun, or has come to ``done`` of ``total`` bytes; both are 0 where bytes say nothing."""

    phase: str
    done: int
    total: int


class Ready(Message, frozen=True):
    """Requests are served from here on, within ``limits``.

    Attributes:
        zero, phases, notes: of the process's start-up ledger.
        kernels: what serves each op, and why.
    """

    limits: ResolvedConfig
    zero: float
    phases: list[Phase]
    notes: list[str]
    kernels: list[ServedKernel]


class Outputs(Message, frozen=True):
    """What one step brought to everybody."""

    outputs: list[TokenOutput]


class Refused(Message, frozen=True):
    """One request cannot run; the others do not notice. ``param`` and ``code`` are the RequestError's."""

    request_id: str
    fault: Fault
    param: str
    code: str

    @classmethod
    def of(cls, request_id: str, error: RequestError) -> "Refused":
        """The request, and why."""
        return cls(request_id, Fault.of(error), error.param, error.code)

    def error(self) -> RequestError:
        """The error as it was raised."""
        fault = self.fault
        parts = {"got": fault.got, "wanted": fault.wanted, "change": fault.change}
        return RequestError(fault.problem, param=self.param, code=self.code, **parts)


class Draining(Message, frozen=True):
    """No more requests are taken."""


class Stats(Message, frozen=True):
    """The engine at one moment.

    Attributes:
        waiting: requests in the queue.
        running: requests that hold a slot.
        used_pages, num_pages: of the KV pool, in pages of PAGE_SIZE rows.
        num_steps: steps since the start.
        step_seconds: what the last one took on the host, in seconds; 0 before the first.
        step_counts: steps by what they took: up to each of STEP_BOUNDS, then longer.
        total_step_seconds: what all of them took.
        num_preemptions: times that a request lost its pages.
        admitted_tokens, cached_tokens: tokens of the requests that were started, and how many of them the prefix cache held.
        num_compiles: kernels that were compiled or loaded since the engine was ready.
        generated_tokens: tokens that answers were given.
    """

    waiting: int
    running: int
    used_pages: int
    num_pages: int
    num_steps: int
    step_seconds: float
    step_counts: list[int]
    total_step_seconds: float
    num_preemptions: int
    admitted_tokens: int
    cached_tokens: int
    num_compiles: int
    generated_tokens: int


FromClient = Add | Abort | AskStats | Drain | Shutdown
"""What an engine that is ready hears. Before, it hears one Hello and one Start."""
FromEngine = Hello | Failed | Progress | Ready | Outputs | Refused | Draining | Stats
"""What a client hears."""

_encoder = msgspec.msgpack.Encoder()
_T = TypeVar("_T")


@cache
def version() -> str:
    """The package's version and a digest of every message's fields and types: nobody has to remember to count it up."""
    fields = msgspec.json.schema(FromClient | Start | FromEngine)
    return f"{__version__}-{hashlib.sha256(msgspec.json.encode(fields)).hexdigest()[:12]}"


def check_version(theirs: str) -> None:
    """Refuse a peer of another version, as there is after an engine's restart under a package that was changed meanwhile.

    Raises: ConfigError.
    """
    if theirs != version():
        problem, change = "client and engine process are of different versions", "restart the program that started the engine"
        raise ConfigError(problem, got=theirs, wanted=version(), change=change)


def pack(message: Message) -> bytes:
    """A message as a frame: its length in 4 bytes, little end first, then msgpack."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    """The message in a frame's body.

    Raises: ProtocolError when it is none that ``decoder`` takes.
    """
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        wanted, change = "a message of this version", "restart both processes; if it happens again, report it"
        raise ProtocolError("a message cannot be read", got=str(error), wanted=wanted, change=change) from error


class FrameBuffer:
    """Cuts a stream of bytes, in whatever pieces it comes, into the bodies of frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take more bytes; yield each body that is complete.

        Raises: ProtocolError on a length that no message has.
        """
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if not 0 < length <= MAX_FRAME:
                wanted, change = f"1 to {MAX_FRAME:,}", "send frames of this protocol"
                raise ProtocolError("a frame's length is out of range", got=f"{length:,} bytes", wanted=wanted, change=change)
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield body
