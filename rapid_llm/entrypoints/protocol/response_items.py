"""Items of /v1/responses: what a conversation is made of, in and out. Those of an answer may be sent back as they came."""

from typing import Any, Literal

import msgspec

from rapid_llm.entrypoints.protocol.chat import ChatMessage, template_role
from rapid_llm.entrypoints.protocol.fields import Strict
from rapid_llm.entrypoints.protocol.tool_calls import FunctionCall, ToolCall
from rapid_llm.errors import RequestError


class InputText(Strict, kw_only=True, tag_field="type", tag="input_text"):
    """A piece of what a user or a tool says."""

    text: str


class SaidText(Strict, kw_only=True, tag_field="type", tag="output_text"):
    """A piece of an earlier answer, as it came."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ThoughtText(Strict, kw_only=True, tag_field="type", tag="reasoning_text"):
    """A piece of an earlier answer's reasoning."""

    text: str


Text = str | list[InputText | SaidText | ThoughtText]


class InputItem(Strict, kw_only=True):
    """A message (``role``, ``content``), a call of a function (``call_id``, ``name``, ``arguments``), what it returned

    (``call_id``, ``output``), or the reasoning of an earlier answer (``content``).
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str | None = None
    content: Text | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Text | None = None
    summary: list[Any] | None = None
    id: str | None = None
    status: str | None = None
    phase: None = None
    encrypted_content: None = None

    def check(self, place: int) -> None:
        """Raise RequestError unless it has the fields of its type, and no others."""
        needed, more = _FIELDS[self.type]
        sent = {name for name in self.__struct_fields__ if getattr(self, name) is not None}
        wrong = sorted((needed - sent) or (sent - needed - more - {"type", "id", "status"}))
        if wrong:
            param, has = f"input[{place}].{wrong[0]}", "is missing" if wrong[0] in needed else "cannot be used"
            change = f"send {', '.join(sorted(needed))}, and nothing of other types"
            raise RequestError(f"{param} {has}", param=param, got=f"type {self.type!r}", change=change)


_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "message": ({"role", "content"}, set()),
    "function_call": ({"call_id", "name", "arguments"}, set()),
    "function_call_output": ({"call_id", "output"}, set()),
    "reasoning": (set(), {"content", "summary"}),
}
"""By type, the fields that an item must have and those that it may have."""


def messages_of(items: list[InputItem]) -> list[ChatMessage]:
    """Items as the messages of a chat: reasoning, words and calls that follow each other are one turn of the assistant.

    Raises: RequestError as ``InputItem.check`` does.
    """
    messages: list[ChatMessage] = []
    for place, item in enumerate(items):
        item.check(place)
        match item.type:
            case "reasoning":
                messages.append(ChatMessage(role="assistant", reasoning_content=_joined(item.content) or None))
            case "function_call":
                function = FunctionCall(name=item.name or "", arguments=item.arguments or "")
                turn = _assistants_turn(messages)
                turn.tool_calls = [*(turn.tool_calls or ()), ToolCall(id=item.call_id or "", type="function", function=function)]
            case "function_call_output":
                messages.append(ChatMessage(role="tool", content=_joined(item.output), tool_call_id=item.call_id))
            case _:
                role = template_role(item.role or "")
                said = _joined(item.content)
                if role == "assistant" and messages and _is_thought_alone(messages[-1]):
                    messages[-1].content = said
                else:
                    messages.append(ChatMessage(role=role, content=said))
    for message in messages:
        if _is_thought_alone(message):
            message.content = ""
    return messages


def _assistants_turn(messages: list[ChatMessage]) -> ChatMessage:
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant"))
    return messages[-1]


def _is_thought_alone(message: ChatMessage) -> bool:
    return message.role == "assistant" and message.content is None and not message.tool_calls


def _joined(text: Text | None) -> str:
    return text if isinstance(text, str) else "".join(part.text for part in text or ())


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of an answer."""

    text: str
    annotations: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What the model wrote for itself."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What the model said; ``status`` of every item is "in_progress", "completed" or "incomplete"."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: str
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model wrote between its marks of reasoning; there is no summary of it."""

    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function, its arguments as JSON text, as the model wrote them."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem
