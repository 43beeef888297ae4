"""One answer's text, read into the items of a response as it grows, and told as the events of its stream."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from msgspec.structs import replace

from rapid_llm.engine.output import CompletionOutput
from rapid_llm.entrypoints.protocol.response_items import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from rapid_llm.entrypoints.server.message import CALL_ID_CHARS
from rapid_llm.entrypoints.tools.events import CallArguments, CallStart, Content, Event, Parser, Reasoning

Tell = Callable[..., bytes]
"""Writes an event: its kind, then its fields by name."""


class OutputItems:
    """Reads one answer.

    Args:
        parser: reads its text; None takes all of it as content.
        most_calls: calls that are told; None tells all.
        tell: writes an event.

    Attributes:
        items: what the answer holds so far, in its order.
    """

    def __init__(self, parser: Parser | None, most_calls: int | None, tell: Tell) -> None:
        self._parser, self._most_calls, self._tell = parser, most_calls, tell
        self.items: list[OutputItem] = []
        self._is_open = False  # the last of them

    def take(self, text: str) -> bytes:
        """The events of more text."""
        if self._parser is None:
            return self._add(Content(text)) if text else b""
        return b"".join(self._add(event) for event in self._parser.feed(text))

    def finish(self, answer: CompletionOutput) -> bytes:
        """The events of the end; an answer that says nothing is an empty message."""
        held = b"".join(self._add(event) for event in self._parser.finish()) if self._parser is not None else b""
        if not self.items:
            held += self._open(_message())
        return held + self._close("incomplete" if answer.finish_reason == "length" else "completed")

    def _add(self, event: Event) -> bytes:
        match event:
            case Content(text):
                opened = b"" if self._writes(OutputMessage) else self._open(_message())
                return opened + self._grow("response.output_text.delta", text, logprobs=[])
            case Reasoning(text):
                opened = b"" if self._writes(ReasoningItem) else self._open(_reasoning())
                return opened + self._grow("response.reasoning_text.delta", text)
            case CallStart(index, name) if self._tells(index):
                return self._open(FunctionCallItem(id=_name("fc"), status="in_progress", call_id=_call_id(), name=name))
            case CallArguments(index, text) if self._tells(index):
                return self._grow("response.function_call_arguments.delta", text)
        return b""

    def _writes(self, kind: type[OutputItem]) -> bool:
        return self._is_open and isinstance(self.items[-1], kind)

    def _tells(self, index: int) -> bool:
        return self._most_calls is None or index < self._most_calls

    def _open(self, item: OutputItem) -> bytes:
        closed = self._close("completed")
        self.items.append(item)
        self._is_open = True
        if isinstance(item, FunctionCallItem):
            return closed + self._tell("response.output_item.added", item=item, output_index=self._place)
        empty: OutputItem = replace(item, content=[])
        added = self._tell("response.output_item.added", item=empty, output_index=self._place)
        return closed + added + self._tell("response.content_part.added", part=item.content[0], **self._where)

    def _grow(self, kind: str, text: str, **more: Any) -> bytes:
        item = self.items[-1]
        if isinstance(item, FunctionCallItem):
            item.arguments += text
        else:
            item.content[0].text += text
        return self._tell(kind, delta=text, **self._where, **more)

    def _close(self, status: str) -> bytes:
        """End the item that is open, if one is."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self.items[-1]
        item.status = status
        if isinstance(item, FunctionCallItem):
            name, arguments = item.name, item.arguments
            told = self._tell("response.function_call_arguments.done", name=name, arguments=arguments, **self._where)
        else:
            [part] = item.content
            kind = "output_text" if isinstance(part, OutputText) else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if isinstance(part, OutputText) else {}
            told = self._tell(f"response.{kind}.done", text=part.text, **self._where, **more)
            told += self._tell("response.content_part.done", part=part, **self._where)
        return told + self._tell("response.output_item.done", item=item, output_index=self._place)

    @property
    def _place(self) -> int:
        return len(self.items) - 1

    @property
    def _where(self) -> dict[str, Any]:
        item = self.items[-1]
        place = {"item_id": item.id, "output_index": self._place}
        return place if isinstance(item, FunctionCallItem) else {**place, "content_index": 0}


def _message() -> OutputMessage:
    return OutputMessage(id=_name("msg"), status="in_progress", content=[OutputText(text="")])


def _reasoning() -> ReasoningItem:
    return ReasoningItem(id=_name("rs"), status="in_progress", content=[ReasoningText(text="")])


def _name(prefix: str) -> str:
    return f"{prefix}-{uuid4().hex}"


def _call_id() -> str:
    return uuid4().hex[:CALL_ID_CHARS]
