"""Calls of tools, as an assistant's message holds them."""

import json
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from rapid_llm.entrypoints.protocol.fields import Strict


class FunctionCall(Strict, kw_only=True):
    """The name of a tool, and its arguments as JSON text, as the model wrote them."""

    name: str
    arguments: str


class ToolCall(Strict, kw_only=True, omit_defaults=True):
    """A call. ``index`` is what clients keep of a stream, and may be sent back."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: the arguments as an object, where they are one."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):  # the model wrote something else, and the conversation goes on
            arguments = None
        written = arguments if isinstance(arguments, dict) else self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": written}}


class FunctionDelta(msgspec.Struct):
    """What is new of a function's call; its first says the name."""

    arguments: str = ""
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """What is new of a call; its first says id and type."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None
