"""The exception tree, and the one way a message is put together.

    RapidError
    ├── ConfigError        a setting, flag, variable or device that cannot be honoured
    ├── CheckpointError    a file on disk that cannot be loaded, by file, tensor or key
    ├── RequestError       one user's ask that cannot be served; carries the request id (an HTTP 4xx)
    ├── NoKernelError      no row serves an op here; lists every row and all its reasons
    ├── KernelInputError   a tensor that a kernel's contract does not allow: shape, dtype, strides, device
    ├── EngineDiedError    the engine's process has ended; carries its exit code and what it said last
    └── ProtocolError      bytes between the two processes that are no message of this version

Every message says what came, what was wanted and what to change, in one paragraph. The CLI prints it and exits with 2.
"""

from collections.abc import Sequence
from typing import Any


class RapidError(Exception):
    """Base of every error that a user can act on.

    Args:
        problem: what is wrong, naming the file, field or flag.
        got: what came.
        wanted: what would have been accepted.
        change: the next thing to do, as an imperative clause.
    """

    def __init__(self, problem: str, *, got: str = "", wanted: str = "", change: str = "") -> None:
        self.problem, self.got, self.wanted, self.change = problem, got, wanted, change
        details = ", ".join(f"{label} {text}" for label, text in (("got", got), ("wanted", wanted)) if text)
        message = f"{problem}: {details}" if details else problem
        super().__init__(f"{message}; {change}." if change else f"{message}.")


class ConfigError(RapidError):
    """A setting, flag, environment variable or device that cannot be honoured."""


class CheckpointError(RapidError):
    """A checkpoint that is missing, broken, or of a kind this version does not read."""


class RequestError(RapidError):
    """A request that cannot be served. Hurts only its sender.

    Args:
        param: the field of the request that is wrong, by its name in Python; empty where it is none alone.
        code: what kind of mistake it is, for programs.

    Attributes:
        request_id: the id of the request, or None when it was refused before it had one.
    """

    request_id: str | None = None

    def __init__(self, problem: str, *, param: str = "", code: str = "invalid_value", **parts: str) -> None:
        self.param, self.code = param, code
        super().__init__(problem, **parts)


class NoKernelError(RapidError):
    """No row of an op serves this device, dtype and shape."""


class KernelInputError(RapidError):
    """A tensor that does not meet the contract of the op it was passed to. Nothing was launched."""


class EngineDiedError(RapidError):
    """The engine's process has ended, so its open requests cannot be answered.

    Attributes:
        exit_code: its exit status; minus the signal's number where one ended it; None where it could not be learnt.
        last_lines: the end of what it wrote to stderr.
    """

    def __init__(self, exit_code: int | None, last_lines: Sequence[str] = ()) -> None:
        self.exit_code, self.last_lines = exit_code, tuple(last_lines)
        said = f", which said last: {' | '.join(last_lines)}" if last_lines else ""
        change = "send the request again after a restart"
        super().__init__("the engine process has ended", got=f"exit code {exit_code}{said}", change=change)


class ProtocolError(RapidError):
    """What came from the other process is no message of this version. The connection ends with it."""


def describe(op: str, **tensors: Any) -> str:
    """One line with shape, dtype, strides and device of each tensor, for a KernelInputError."""
    parts = []
    for name, tensor in tensors.items():
        if hasattr(tensor, "stride"):
            shape, strides = list(tensor.shape), list(tensor.stride())
            parts.append(f"{name} {shape} {str(tensor.dtype).removeprefix('torch.')} strides {strides} on {tensor.device}")
        else:
            parts.append(f"{name}={tensor!r}")
    return f"{op}({'; '.join(parts)})"
