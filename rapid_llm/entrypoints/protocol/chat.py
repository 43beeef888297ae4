"""/v1/chat/completions: a conversation in, the assistant's next message out."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from rapid_llm.engine.output import Logprob
from rapid_llm.entrypoints.protocol.fields import SamplingFields, Strict
from rapid_llm.entrypoints.protocol.formats import ResponseFormat
from rapid_llm.entrypoints.protocol.tool_calls import ToolCall, ToolCallDelta
from rapid_llm.entrypoints.protocol.usage import Usage


class TextPart(Strict, kw_only=True, tag_field="type", tag="text"):
    """A piece of a message's text."""

    text: str


class ChatMessage(Strict, kw_only=True):
    """One message. What an assistant's message of an answer holds may be sent back as it came."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[dict[str, Any]] | None = None
    audio: None = None
    function_call: None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _FOR_TEMPLATE}
        values["role"] = template_role(self.role)
        if isinstance(self.content, list):
            values["content"] = "".join(part.text for part in self.content)
        values["tool_calls"] = [call.for_template() for call in self.tool_calls or ()] or None
        return {name: value for name, value in values.items() if value is not None}


def template_role(role: str) -> str:
    """A role as templates know it: OpenAI's newer word for "system" is "developer"."""
    return "system" if role == "developer" else role


_FOR_TEMPLATE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


class ChatRequest(SamplingFields, kw_only=True):
    """A conversation and how its answer is drawn."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens: its text, the bytes of it, and the natural log of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry for each token of the answer."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct):
    """What the model said; ``content`` is null where that is calls of tools alone."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One of ``n`` answers."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """All answers at once."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What is new of a message; its first says the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. ``usage`` is null in all but the last where it was asked for, and absent where it was not."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | UnsetType = UNSET
