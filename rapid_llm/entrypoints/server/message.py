"""One answer's text, read into the parts of an assistant's message as it grows."""

from dataclasses import replace
from uuid import uuid4

from msgspec import UNSET

from rapid_llm.engine.output import CompletionOutput
from rapid_llm.entrypoints.protocol.chat import AnswerMessage, ChatDelta
from rapid_llm.entrypoints.protocol.tool_calls import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from rapid_llm.entrypoints.tools.events import CallArguments, CallStart, Content, Event, Parser, Reasoning

CALL_ID_CHARS = 9
"""Of letters and digits: the one length that Mistral's templates take, too."""


class MessageReader:
    """Reads one answer.

    Args:
        parser: reads its text; None takes all of it as content.
        most_calls: calls that are told; those behind them are left out. None tells all.
    """

    def __init__(self, parser: Parser | None, most_calls: int | None) -> None:
        self._parser, self._most_calls = parser, most_calls
        self._calls = False

    def take(self, answer: CompletionOutput) -> ChatDelta:
        """What ``answer.delta`` adds, and what was held back where it is the last."""
        if self._parser is None:
            return ChatDelta(content=answer.delta or None)
        events = self._parser.feed(answer.delta)
        if answer.finish_reason is not None:
            events += self._parser.finish()
        delta = ChatDelta()
        for event in events:
            self._add(delta, event)
        return delta

    def whole(self, answer: CompletionOutput) -> AnswerMessage:
        """The message of an answer that is told at once."""
        delta = self.take(replace(answer, delta=answer.text))
        calls = [ToolCall(id=call.id or "", type="function", function=_whole(call.function)) for call in delta.tool_calls or ()]
        content = delta.content if delta.content or calls else ""
        return AnswerMessage(content, reasoning_content=delta.reasoning_content or UNSET, tool_calls=calls if calls else UNSET)

    def finish_reason(self, answer: CompletionOutput) -> str | None:
        """The answer's; one that ended by itself and calls tools has "tool_calls"."""
        return "tool_calls" if self._calls and answer.finish_reason == "stop" else answer.finish_reason

    def _add(self, delta: ChatDelta, event: Event) -> None:
        match event:
            case Content(text):
                delta.content = (delta.content or "") + text
            case Reasoning(text):
                delta.reasoning_content = (delta.reasoning_content or "") + text
            case CallStart(index, name) if self._tells(index):
                self._calls = True
                begun = ToolCallDelta(index, FunctionDelta(name=name), uuid4().hex[:CALL_ID_CHARS], "function")
                delta.tool_calls = [*(delta.tool_calls or ()), begun]
            case CallArguments(index, text) if self._tells(index):
                if not delta.tool_calls or delta.tool_calls[-1].index != index:
                    delta.tool_calls = [*(delta.tool_calls or ()), ToolCallDelta(index, FunctionDelta())]
                delta.tool_calls[-1].function.arguments += text

    def _tells(self, index: int) -> bool:
        return self._most_calls is None or index < self._most_calls


def _whole(function: FunctionDelta) -> FunctionCall:
    return FunctionCall(name=function.name or "", arguments=function.arguments)
