"""/v1/responses: OpenAI's newer form of a conversation. Nothing is kept, so each request brings all of it."""

from typing import Any, Literal

import msgspec

from rapid_llm.entrypoints.protocol.chat import template_role
from rapid_llm.entrypoints.protocol.fields import DrawingFields, Strict
from rapid_llm.entrypoints.protocol.formats import ResponseTextFormat


class InputText(Strict, kw_only=True, tag_field="type", tag="input_text"):
    """A piece of what a user says."""

    text: str


class SaidText(Strict, kw_only=True, tag_field="type", tag="output_text"):
    """A piece of an earlier answer, as it came."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Strict, kw_only=True):
    """One message; an item of an earlier answer's ``output`` may be sent as it came."""

    role: str
    content: str | list[InputText | SaidText]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": template_role(self.role), "content": content}


class TextSettings(Strict, kw_only=True):
    """What the answer's text may be."""

    format: ResponseTextFormat | None = None


class ObfuscationOptions(Strict, kw_only=True):
    """``include_obfuscation`` may be false, which it always is."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(DrawingFields, kw_only=True):
    """A conversation and how its answer is drawn. ``previous_response_id`` may only be null, since no response is kept."""

    input: str | list[InputMessage]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextSettings | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    stream_options: ObfuscationOptions | None = None

    def messages(self) -> list[dict[str, Any]]:
        """The conversation, as chat templates read it."""
        before = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*before, {"role": "user", "content": self.input}]
        return [*before, *(message.for_template() for message in self.input)]


class OutputText(msgspec.Struct, kw_only=True):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []


class OutputMessage(msgspec.Struct, kw_only=True):
    """What the model said; ``status`` is "in_progress", "completed" or "incomplete"."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: str
    content: list[OutputText]


class IncompleteDetails(msgspec.Struct):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class InputTokensDetails(msgspec.Struct):
    """Tokens of the prompt that the prefix cache held."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    """Tokens of the answer that are reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens, by their names here."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """The whole answer, or where it stands; settings are repeated as they were asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    model: str
    output: list[OutputMessage]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: bool = False
    tool_choice: str = "none"
    tools: list[Any] = []
    truncation: str = "disabled"


class ResponseEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event of a stream. Which fields it has depends on its type, as OpenAI's pages say."""

    type: str
    sequence_number: int
    response: Response | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    item: OutputMessage | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[Any] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
