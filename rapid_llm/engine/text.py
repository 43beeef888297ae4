"""The text half of a request: ids to text, stop strings, and the output that the user sees."""

from rapid_llm.config import SamplingParams
from rapid_llm.engine.detokenizer import IncrementalDetokenizer
from rapid_llm.engine.output import CompletionOutput, Logprob, RequestOutput
from rapid_llm.engine.request import TokenOutput
from rapid_llm.engine.stop import StopChecker
from rapid_llm.engine.tokenizer import Tokenizer
from rapid_llm.step import SampledToken

NO_NUMBER = (
    "the model's output held no number to sample from (NaN, or every token banned): the weights or the KV pool are damaged"
)


class TextRequest:
    """Follows one request of the token half and keeps its RequestOutput up to date."""

    def __init__(self, output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer, *, continues: bool) -> None:
        """``continues``: whether the answer goes on from the prompt's text (generate), rather than beginning a text (chat)."""
        self.output = output
        self.answer: CompletionOutput = output.outputs[0]
        if params.logprobs is not None:
            self.answer.logprobs = []
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, continues=continues)
        self._stop = StopChecker(params.stop_strings)

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.output.finished

    def take(self, update: TokenOutput) -> bool:
        """Add what a step brought; True when a stop string ended the answer, so that the token half must be told."""
        self.answer.delta = ""
        self.output.num_cached_tokens = update.num_cached_tokens
        if update.token is not None:
            self._add_token(update.token)
        if self.finished:
            return True
        if update.finish_reason is not None:
            self._end(update)
        return False

    def _add_token(self, token: SampledToken) -> None:
        answer = self.answer
        answer.token_ids.append(token.token_id)
        if answer.logprobs is not None:
            answer.logprobs.append(self._logprob_entry(token))
        self._add_text(self._detokenizer.push([token.token_id]))

    def _add_text(self, text: str) -> None:
        safe, matched = self._stop.push(text)
        self._emit(safe)
        if matched is not None:
            self.answer.finish_reason, self.answer.stop_reason = "stop", matched
            self.output.finished = True

    def _end(self, update: TokenOutput) -> None:
        """Let go of what was held back; it may still complete a stop string."""
        self._add_text(self._detokenizer.finish())
        if self.finished:
            return
        self._emit(self._stop.finish())
        self.answer.finish_reason = update.finish_reason
        self.answer.stop_reason = update.stop_id
        self.output.finished = True
        if update.finish_reason == "error":
            self.output.error = NO_NUMBER

    def _emit(self, text: str) -> None:
        self.answer.text += text
        self.answer.delta += text

    def _logprob_entry(self, token: SampledToken) -> dict[int, Logprob]:
        """By id: the likeliest with their ranks, and the chosen one whether it is among them or not."""
        chosen, *likeliest = zip(token.logprob_ids, token.logprobs, strict=True)
        ranks = {its_id: rank for rank, (its_id, _) in enumerate(likeliest, start=1)}
        return {
            its_id: Logprob(value, ranks.get(its_id), self._tokenizer.token_text(its_id))
            for its_id, value in (chosen, *likeliest)
        }
