"""/tokenize and /detokenize: the model's tokenizer, as requests go through it."""

from typing import Any

import msgspec

from rapid_llm.entrypoints.protocol.chat import ChatMessage
from rapid_llm.entrypoints.protocol.fields import ForModel


class TokenizeRequest(ForModel, kw_only=True):
    """A text as /v1/completions would take it, or a conversation, with its tools, as /v1/chat/completions would."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_special_tokens: bool = True


class TokenizeResponse(msgspec.Struct):
    """Ids, how many there are, and how many tokens prompt and answer may have together."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(ForModel, kw_only=True):
    """Token ids."""

    tokens: list[int]
    skip_special_tokens: bool = False


class DetokenizeResponse(msgspec.Struct):
    """Their text."""

    prompt: str
