"""The text half of a request: ids to text, stop strings, and the output that the user sees."""

import math

from rapid_llm.config import SamplingParams
from rapid_llm.engine.detokenizer import IncrementalDetokenizer
from rapid_llm.engine.output import EVERY_TOKEN_BANNED, LOWEST_LOGPROB, CompletionOutput, Logprob, RequestOutput
from rapid_llm.engine.request import FinishReason, TokenOutput
from rapid_llm.engine.stop import StopChecker
from rapid_llm.engine.tokenizer import Tokenizer
from rapid_llm.errors import RapidError
from rapid_llm.step import ALL_BANNED, NO_NUMBER, NO_WAY_ON, SampledToken

FAILURES = {
    NO_NUMBER: "the model's output held no number to sample from (NaN, or -inf alone): the weights or the KV pool are damaged",
    ALL_BANNED: EVERY_TOKEN_BANNED,
    NO_WAY_ON: "the grammar could not be followed any further: it is too complex, or no token of the model goes on from here; "
    "make it simpler",
}
"""What each failure of step.py means, for users."""


def follow(output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer, *, continues: bool) -> "list[TextRequest]":
    """The text half of each answer to a new request; ``continues`` as in TextRequest.

    Args:
        output: with no answers yet.
    """
    output.outputs = [CompletionOutput(index) for index in range(params.n)]
    if params.prompt_logprobs is not None:
        output.prompt_logprobs = [None]
    return [TextRequest(output, answer, params, tokenizer, continues=continues) for answer in output.outputs]


class TextRequest:
    """Follows one sequence of the token half, an answer to a request, and keeps the RequestOutput up to date.

    The ids are as new as the last step. Their text is behind until somebody looks (``catch_up``) or the answer ends, since many
    ids at once cost far less than one by one; where there are stop strings it is not, so that none is found late.

    Attributes:
        id: the sequence's: the request's where it has one answer, else with the answer's number behind it.
    """

    def __init__(
        self, output: RequestOutput, answer: CompletionOutput, params: SamplingParams, tokenizer: Tokenizer, *, continues: bool
    ) -> None:
        """``continues``: whether the answer goes on from the prompt's text (generate), rather than beginning a text (chat)."""
        self.output, self.answer = output, answer
        self.id = output.request_id if params.n == 1 else f"{output.request_id}/{answer.index}"
        if params.logprobs is not None:
            self.answer.logprobs = []
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, continues=continues)
        self._stop = StopChecker(params.stop_strings)
        self._reads_at_once = bool(params.stop_strings)
        self._num_read = 0
        self._min_tokens = params.min_tokens

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.answer.finish_reason is not None

    def take(self, update: TokenOutput) -> bool:
        """Add what a step brought; True when a stop string ended the answer, so that the token half must be told."""
        if self.answer.index == 0:  # what the others find in the cache is what the first has computed
            self.output.num_cached_tokens = update.num_cached_tokens
            self.output.queue_seconds = update.queue_seconds or self.output.queue_seconds
        for token in update.prompt:
            self._add_prompt_token(token)
        if update.token is not None:
            self._add_token(update.token)
        if self.finished:
            return True
        if update.finish_reason is not None:
            if update.ending is not None and self.answer.logprobs is not None:
                self.answer.ending = (update.ending.token_id, self._logprob_entry(update.ending))
            self._end(update.finish_reason, update.stop_id)
            if self.answer.finish_reason == "error":
                self.output.error = FAILURES[update.failure]
        return False

    def catch_up(self) -> None:
        """Bring the text up to the ids."""
        ids = self.answer.token_ids
        if self._num_read == len(ids):
            return
        text = self._detokenizer.push(ids[self._num_read :])
        self._num_read = len(ids)
        if len(ids) <= self._min_tokens:
            self._emit(text)  # no stop string may begin here
        else:
            self._add_text(text)

    def fail(self, error: RapidError) -> None:
        """End with an error that is not of a step."""
        self.catch_up()
        self.output.error = str(error)
        self._finish("error", None)

    def abort(self) -> None:
        """End as aborted, unless it is complete: nothing more will come."""
        if not self.finished:
            self._end("abort")

    def _add_prompt_token(self, token: SampledToken) -> None:
        if self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs.append(self._logprob_entry(token))

    def _add_token(self, token: SampledToken) -> None:
        answer = self.answer
        answer.token_ids.append(token.token_id)
        if answer.logprobs is not None:
            answer.logprobs.append(self._logprob_entry(token))
        if self._reads_at_once:
            self.catch_up()

    def _add_text(self, text: str) -> None:
        safe, matched = self._stop.push(text)
        self._emit(safe)
        if matched is not None:
            self._finish("stop", matched)

    def _end(self, reason: FinishReason, stop_id: int | None = None) -> None:
        """Let go of what was held back; it may still complete a stop string."""
        self.catch_up()
        self._add_text(self._detokenizer.finish())
        if not self.finished:
            self._emit(self._stop.finish())
            self._finish(reason, stop_id)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.answer.finish_reason, self.answer.stop_reason = reason, stop_reason
        self.output.finished = all(answer.finish_reason is not None for answer in self.output.outputs)

    def _emit(self, text: str) -> None:
        self.answer.text += text
        self.answer.delta += text

    def _logprob_entry(self, token: SampledToken) -> dict[int, Logprob]:
        """By id: the likeliest with their ranks, and the token itself whether it is among them or not."""
        (own_id, own), *likeliest = zip(token.logprob_ids, token.logprobs, strict=True)
        possible = [(its_id, value) for its_id, value in likeliest if value > -math.inf]
        ranks = {its_id: rank for rank, (its_id, _) in enumerate(possible, start=1)}
        return {
            its_id: Logprob(value, ranks.get(its_id), self._tokenizer.token_text(its_id))
            for its_id, value in ((own_id, max(own, LOWEST_LOGPROB)), *possible)
        }
