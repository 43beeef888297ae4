"""/v1/completions: a text, or ids, to be continued as they stand."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from rapid_llm.engine.output import Logprob
from rapid_llm.entrypoints.protocol.fields import SamplingFields
from rapid_llm.entrypoints.protocol.usage import Usage


class CompletionRequest(SamplingFields, kw_only=True):
    """One prompt or several, each a text or a list of token ids; with ``echo`` the prompt stands before its answer.

    With ``echo`` and ``max_tokens`` 0 there is no answer: the prompt's own log-probs are what is asked for.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class CompletionLogprobs(msgspec.Struct):
    """Lists with an entry a token, the end of text that ended the answer included; the first of a prompt has null, since nothing
    stands before it. Offsets are in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One answer, or in a stream what is new of it; index counts ``n`` for each prompt in turn.

    The first answer to a prompt brings the ``prompt_logprobs`` that were asked for.
    """

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """All answers at once, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
