"""Fields that several kinds of request share: how an answer is drawn, how it is sent, and what is accepted without effect."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rapid_llm.config import Grammar, SamplingParams

NO_EFFECT = ("user", "metadata", "service_tier", "store", "safety_identifier", "prompt_cache_key")
"""Accepted, since clients send them and no text depends on them; each use is logged. ``store`` may only be false."""


Number = int | float
"""Kept as it was sent, so that an error repeats it so."""


class Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a request: fields that are not its own are refused."""


class ForModel(Strict, kw_only=True):
    """Any request that a model answers; null is the one that is served."""

    model: str | None = None


class RequestFields(ForModel, kw_only=True):
    """What every request for text may say besides what it is about."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    store: Literal[False] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def ignored(self) -> list[str]:
        """Fields of NO_EFFECT that were sent."""
        return [name for name in NO_EFFECT if getattr(self, name) is not None]


class StreamOptions(Strict, kw_only=True):
    """``include_usage`` adds a last chunk that counts tokens, ``continuous_usage_stats`` counts them on every chunk.

    ``include_obfuscation`` may be false, which it always is.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GrammarField(Strict, kw_only=True):
    """A grammar: ``kind`` and ``source`` as Grammar has them, which checks them."""

    kind: str
    source: str = ""

    def grammar(self) -> Grammar:
        """As SamplingParams takes it."""
        return Grammar(self.kind, self.source)


class DrawingFields(RequestFields, kw_only=True):
    """How one answer is drawn, by the names of SamplingParams; null is the same as absent. SamplingParams checks the ranges."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[int, Number] | None = None
    bad_words: str | list[str] | None = None
    grammar: GrammarField | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None


class SamplingFields(DrawingFields, kw_only=True):
    """The rest of them, for requests that may ask for several answers and for log-probs."""

    n: int | None = None
    max_tokens: int | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_always(self) -> bool:
        """Whether every chunk of a stream counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


_NOT_SAMPLING = (*RequestFields.__struct_fields__, "stream", "stream_options")
SAMPLING = tuple(name for name in SamplingFields.__struct_fields__ if name not in _NOT_SAMPLING)
"""Fields that are called alike here and in SamplingParams; ``logprobs`` is not, since chat and completions say it differently."""


def sampling_params(fields: Mapping[str, Any], defaults: SamplingParams, **more: Any) -> SamplingParams:
    """The values that a request names, over ``defaults``; ``more`` are those it calls otherwise.

    Raises: RequestError on a value out of range, as SamplingParams does anywhere.
    """
    if isinstance(grammar := fields.get("grammar"), GrammarField):
        more = {"grammar": grammar.grammar()} | more
    return defaults.with_defaults(**{name: fields.get(name) for name in SAMPLING} | more)


def field_values(request: msgspec.Struct) -> dict[str, Any]:
    """A request's fields by name, the parts of it as they are."""
    return {name: getattr(request, name) for name in request.__struct_fields__}
