"""A request as the token half of the engine sees it: ids, pages and counters. It knows no text."""

import time
from dataclasses import dataclass, field
from typing import Literal

from rapid_llm.config import PAGE_SIZE, Grammar
from rapid_llm.kvcache.prefix_cache import Prefix
from rapid_llm.step import Adjust, Record, SampledToken

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What the device samples a request by and where its ids end.

    Attributes:
        max_new_tokens: most ids to sample; prompt plus these never pass the context. 0 of a prompt that becomes a vector.
        end_ids: the model's own end-of-text ids; they end the request and are not part of its output.
        stop_ids: ids that the user asked to end it; not part of its output either.
        temperature, top_k, top_p, min_p, seed, logprobs, processed, prompt_logprobs, adjust: as in step.SlotSetup.
        grammar: what the answer may be; None is anything.
        pooling: as in step.SlotSetup; a request with one ends with its vector.
    """

    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int = -1
    processed: bool = False
    prompt_logprobs: int = -1
    adjust: Adjust | None = None
    grammar: Grammar | None = None
    pooling: str = ""

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether every token of the prompt must be computed once, whatever is known of it already."""
        return self.prompt_logprobs >= 0


@dataclass(slots=True, eq=False)
class Request:
    """One request's life in the token half.

    Attributes:
        id: unique among the requests that are alive.
        prompt_len: ids of the prompt.
        token_ids: prompt, then every output id that has been collected.
        num_computed: leading tokens whose K and V are there or written by the submitted steps.
        num_in_flight: sampled ids that the device still holds (0 or 1).
        num_scored: leading prompt tokens whose successors' log-probs a submitted step brings; only where they are asked for.
        holds_newest: whether the device keeps the newest id in this slot (not after a preemption).
        slot: device slot while it runs.
        pages: its pages in order, while it runs.
        prefix: its leading pages that the prefix cache knows.
        num_cached_tokens: prompt tokens whose K and V it took from the prefix cache when it first ran.
        num_preemptions: times it lost its pages and was computed anew.
        made: when it came, in seconds of the monotonic clock.
        queue_seconds: from there until it first ran; 0 before.
        mask: ids that may come next, as in Chunk; None while that is not known yet, empty without a grammar.
        finish_reason: None while it is alive.
    """

    id: str
    token_ids: list[int]
    rules: TokenRules
    prompt_len: int = field(init=False)
    num_computed: int = 0
    num_in_flight: int = 0
    num_scored: int = 0
    holds_newest: bool = False
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    prefix: Prefix = field(default_factory=Prefix)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    made: float = field(default_factory=time.monotonic)
    queue_seconds: float = 0.0
    mask: bytes | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)
        if self.rules.grammar is None:
            self.mask = b""

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_to_compute(self) -> int:
        """Tokens whose K and V no submitted step writes yet; 0 once the last id that may be asked for is in flight.

        The last one is not to be computed, since an id is sampled with it, before it is known which may be.
        """
        if self.rules.pooling:
            return self.prompt_len - self.num_computed
        num_tokens = self.num_tokens
        if num_tokens - self.prompt_len >= self.rules.max_new_tokens:
            return 0
        return num_tokens - self.num_computed - (self.mask is None)

    @property
    def has_room(self) -> bool:
        """Whether its pages have a row for one more token."""
        return self.num_computed < len(self.pages) * PAGE_SIZE

    @property
    def num_to_score(self) -> int:
        """Prompt tokens whose successors' log-probs no submitted step brings yet."""
        return self.prompt_len - 1 - self.num_scored if self.rules.needs_prompt_logits else 0

    @property
    def computes_all(self) -> bool:
        """Whether the prefix cache is of no use: K and V that are found bring no logits and no hidden states."""
        return bool(self.num_to_score) or self.rules.pooling == "mean"


class TokenOutput(Record, frozen=True):
    """What one step brought to one request.

    Attributes:
        request_id: whose.
        token: the new token; None when it was an end id, the request failed, or there is news of the prompt only.
        finish_reason: set with the last output of a request.
        stop_id: the id of ``stop_ids`` that ended it, if one did.
        ending: the end id that ended it, if one did, with its log-probs.
        prompt: tokens of the prompt, in their order, whose log-probs have come.
        vector: of a request with ``pooling``, with finish_reason "stop": as in StepResult.
        failure: with finish_reason "error": NO_NUMBER, ALL_BANNED or NO_WAY_ON of step.py.
        num_cached_tokens, queue_seconds: as in Request.
    """

    request_id: str
    token: SampledToken | None
    finish_reason: FinishReason | None
    stop_id: int | None = None
    prompt: tuple[SampledToken, ...] = ()
    ending: SampledToken | None = None
    vector: bytes = b""
    failure: int = 0
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
