"""SamplingParams of one prompt -> TokenRules of its answers; refuses what can never run or is no token of the model."""

import math
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from rapid_llm.config import PoolingParams, ResolvedConfig, SamplingParams
from rapid_llm.engine.engine import check_fits
from rapid_llm.engine.request import TokenRules
from rapid_llm.errors import RequestError
from rapid_llm.step import Adjust, Edit

MAX_TOP_K = 2**31 - 1
"""Larger values are as good as off, and the device keeps int32."""

MAX_BAD_WORD_TOKENS = 32
"""Longest bad word: the device keeps so many ids of a sequence, less one."""

_BAN = -100.0  # the bias that is one
_GOLDEN = 0x9E3779B97F4A7C15  # an odd number: its multiples are different 64-bit numbers


@dataclass(frozen=True)
class RuleMaker:
    """What of a model and an engine decides whether a request can run.

    Attributes:
        limits: the engine's sizes.
        vocab_size: ids of the model.
        hidden_size: numbers of a hidden state.
        end_ids: its end-of-text ids.
        encode: text to ids, nothing put around it.
    """

    limits: ResolvedConfig
    vocab_size: int
    hidden_size: int
    end_ids: frozenset[int]
    encode: Callable[[str], list[int]]

    def rules(self, ids: list[int], params: SamplingParams) -> list[TokenRules]:
        """The rules of each answer to the prompt ``ids``.

        Raises:
            RequestError: lengths that never fit, an id that is not the model's, a bad word that is too long.
        """
        max_new_tokens = self._max_new_tokens(len(ids), params)
        self.check_ids("prompt", ids)
        self.check_ids("stop_token_ids", params.stop_token_ids or ())
        self.check_ids("logit_bias", params.logit_bias or ())
        end_ids = frozenset() if params.ignore_eos else self.end_ids
        first = TokenRules(
            max_new_tokens=max_new_tokens,
            end_ids=end_ids,
            stop_ids=frozenset(params.stop_token_ids or ()),
            temperature=params.temperature,
            top_k=min(max(params.top_k, 0), MAX_TOP_K),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            processed=params.logprobs_mode == "processed",
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            adjust=self._adjust(len(ids), params, end_ids),
            grammar=params.grammar,
        )
        others = (replace(first, seed=_derived(first.seed, index), prompt_logprobs=-1) for index in range(1, params.n))
        return [first, *others]

    def pooling_rules(self, ids: list[int], params: PoolingParams) -> TokenRules:
        """The rules of a prompt ``ids`` that becomes a vector; raises as ``rules`` does."""
        if params.dimensions is not None and params.dimensions > self.hidden_size:
            wanted, change = f"1 to {self.hidden_size}, the model's hidden size", "pass another dimensions"
            got = str(params.dimensions)
            raise RequestError("dimensions is out of range", param="dimensions", got=got, wanted=wanted, change=change)
        check_fits(self.limits, len(ids), 0)
        self.check_ids("prompt", ids)
        return TokenRules(0, pooling=params.pooling)

    def _max_new_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        limits = self.limits
        room = min(limits.max_model_len, limits.max_kv_tokens + 1) - prompt_len
        count = max(room, 1) if params.max_tokens is None else params.max_tokens
        check_fits(limits, prompt_len, count)
        if params.min_tokens > count:
            got, wanted = f"{params.min_tokens} behind {prompt_len} prompt tokens", f"at most {count}, which the context has left"
            change = "lower min_tokens"
            raise RequestError("min_tokens is out of range", param="min_tokens", got=got, wanted=wanted, change=change)
        return count

    def check_ids(self, name: str, ids: Collection[int]) -> None:
        """Raise RequestError, which calls them ``name``, where one of ``ids`` is none of the model's."""
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            wanted, change = f"ids from 0 to {self.vocab_size - 1}", "send ids of this model"
            problem = f"{name}: token id out of the vocabulary"
            raise RequestError(problem, param=name, got=str(wrong), wanted=wanted, change=change)

    def _adjust(self, prompt_len: int, params: SamplingParams, end_ids: frozenset[int]) -> Adjust | None:
        biases = (params.logit_bias or {}).items()
        edits = [Edit(token, -math.inf if bias == _BAN else float(bias)) for token, bias in biases if bias]
        if params.min_tokens:
            ending = {token for token in end_ids if token < self.vocab_size}.union(params.stop_token_ids or ())
            edits += [Edit(token, -math.inf, prompt_len + params.min_tokens) for token in sorted(ending)]
        edits += [Edit(word[-1], -math.inf, prefix=word[:-1]) for word in self._bad_words(params.bad_strings)]
        adjust = Adjust(
            repetition_penalty=float(params.repetition_penalty),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            edits=tuple(edits),
            prompt_len=prompt_len,
        )
        return adjust if edits or adjust.penalises else None

    def _bad_words(self, words: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Each word as it is and behind a space, which most vocabularies put into its first token."""
        sequences = {tuple(self.encode(text)): word for word in words for text in (word, " " + word)}
        for sequence, word in sequences.items():
            if not 1 <= len(sequence) <= MAX_BAD_WORD_TOKENS:
                wanted = f"1 to {MAX_BAD_WORD_TOKENS} tokens"
                got, change = f"{word!r:.60}, {len(sequence)} tokens", "shorten or remove the word"
                raise RequestError("bad_words is out of range", param="bad_words", got=got, wanted=wanted, change=change)
            self.check_ids("bad_words", sequence)
        return list(sequences)


def _derived(seed: int, index: int) -> int:
    """The seed of answer ``index``, a signed 64-bit number."""
    return (seed + index * _GOLDEN + 2**63) % 2**64 - 2**63
