"""What a user gets back: RequestOutput, in the shape that users of vLLM know."""

from dataclasses import dataclass, field

from rapid_llm.engine.request import FinishReason

LOWEST_LOGPROB = -9999.0
"""Stands for the log of 0, which JSON cannot say."""
EVERY_TOKEN_BANNED = (
    "every token was banned: by logit_bias, bad_words, min_tokens or the grammar, or all of them together; ban fewer"
)
"""The error of a request that leaves no token to choose."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural log of one token's probability, by the distribution that ``SamplingParams.logprobs_mode`` names.

    Attributes:
        logprob: the value, finite: LOWEST_LOGPROB where the model rules out a token that a prompt holds.
        rank: 1 for the likeliest; None for a chosen token that is not among those reported.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the request's answers.
        text: what it says so far; ends before a stop string.
        token_ids: its ids, no end-of-text id among them.
        finish_reason: "stop" (end of text or a stop string), "length", "abort", "error"; None while it goes on.
        stop_reason: the stop string or id of ``stop_token_ids`` that ended it, if one did.
        logprobs: a dict by token id for each of ``token_ids``; None unless asked for.
        ending: the id that ended it, of the end of text or of ``stop_token_ids``, and its entry as in ``logprobs``; None where no
            id did, or they were not asked for.
        delta: in a stream, the text that is new since the output before; else all of it.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    ending: tuple[int, dict[int, Logprob]] | None = None
    delta: str = ""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the chosen tokens' log-probs; None unless asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers.

    Attributes:
        request_id: the id it ran under.
        prompt: its text; None when ids were given.
        prompt_token_ids: its ids, special tokens included.
        outputs: the answers, as many as SamplingParams.n says.
        finished: whether nothing more will come to any of them.
        error: why the request failed, when finish_reason is "error".
        prompt_logprobs: for each of ``prompt_token_ids`` a dict by token id, None for the first, which nothing stands before;
            None unless asked for.
        num_cached_tokens: prompt tokens that the prefix cache spared the model, in the first of several answers: the others share
            what that one has computed.
        queue_seconds: from the request's coming until it first ran (the first of several answers); 0 before.
        embedding: the vector of a prompt that was embedded; None of one that was answered, and while it is not there.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = field(default=0.0, compare=False)
    embedding: list[float] | None = None
