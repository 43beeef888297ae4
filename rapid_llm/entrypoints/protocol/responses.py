"""/v1/responses: OpenAI's newer form of a conversation. Nothing is kept, so each request brings all of it."""

from typing import Any, Literal

import msgspec

from rapid_llm.entrypoints.protocol.chat import ChatMessage, ChatRequest
from rapid_llm.entrypoints.protocol.fields import DrawingFields, Strict
from rapid_llm.entrypoints.protocol.formats import ResponseTextFormat
from rapid_llm.entrypoints.protocol.response_items import InputItem, OutputItem, OutputText, ReasoningText, messages_of


class FunctionTool(Strict, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """As a chat request has it."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {"type": "function", "function": {name: value for name, value in values.items() if value is not None}}


class TextSettings(Strict, kw_only=True):
    """What the answer's text may be."""

    format: ResponseTextFormat | None = None


class ObfuscationOptions(Strict, kw_only=True):
    """``include_obfuscation`` may be false, which it always is."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(DrawingFields, kw_only=True):
    """A conversation and how its answer is drawn. ``previous_response_id`` may only be null, since no response is kept."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextSettings | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    stream_options: ObfuscationOptions | None = None

    def for_chat(self) -> ChatRequest:
        """The same as a chat request, which its answer is drawn for.

        Raises: RequestError when an item of the input cannot be used.
        """
        before = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        said = [ChatMessage(role="user", content=self.input)] if isinstance(self.input, str) else messages_of(self.input)
        shared = {name: getattr(self, name) for name in DrawingFields.__struct_fields__}
        return ChatRequest(
            **shared,
            messages=[*before, *said],
            max_tokens=self.max_output_tokens,
            response_format=None if self.text is None or self.text.format is None else self.text.format.for_chat(),
            tools=[tool.for_chat() for tool in self.tools] if self.tools is not None else None,
            tool_choice=_choice_for_chat(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
        )


def _choice_for_chat(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and choice.keys() == {"type", "name"}:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


class IncompleteDetails(msgspec.Struct):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class InputTokensDetails(msgspec.Struct):
    """Tokens of the prompt that the prefix cache held."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    """Tokens of the answer that are reasoning, as the tokenizer counts its text."""

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
    output: list[OutputItem]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: bool = False
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    truncation: str = "disabled"


class ResponseEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event of a stream. Which fields it has depends on its type, as OpenAI's pages say."""

    type: str
    sequence_number: int
    response: Response | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
