"""The text half of an engine: prompts to ids, what can never run refused, ids back to text. It sits where the client is."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.checkpoint.source import CheckpointSource
from rapid_llm.config import PoolingParams, ResolvedConfig, SamplingParams
from rapid_llm.engine.embedding import EmbeddingRequest
from rapid_llm.engine.output import RequestOutput
from rapid_llm.engine.request import TokenRules
from rapid_llm.engine.rules import RuleMaker
from rapid_llm.engine.templates import render
from rapid_llm.engine.text import TextRequest, follow
from rapid_llm.engine.tokenizer import Tokenizer, end_ids
from rapid_llm.errors import RequestError
from rapid_llm.ledger import StartupLedger

Prompt = str | Sequence[int]
"""Text, or token ids that are taken as they are."""
Encoded = tuple[str | None, list[int]]
"""A prompt's text, if it came as one, and its ids."""
Message = Mapping[str, Any]
"""{"role": ..., "content": ...}."""
Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}."""


def open_model(path: Path, ledger: StartupLedger) -> tuple[CheckpointSource, Tokenizer]:
    """Open a checkpoint and make its tokenizer.

    Raises: CheckpointError when either is broken or of a kind that is not read.
    """
    with ledger.phase("open checkpoint"):
        source = open_checkpoint(path)
    with ledger.phase("tokenizer"):
        return source, Tokenizer.from_checkpoint(source)


class Frontend:
    """What a client of one engine needs to know of its model. Safe to use from several threads.

    Args:
        source: the open checkpoint; of it the sampling defaults, the vocabulary and the end-of-text ids are kept.
        tokenizer: the model's.
        limits: the engine's sizes, against which requests are checked before it sees them.
    """

    def __init__(self, source: CheckpointSource, tokenizer: Tokenizer, limits: ResolvedConfig) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self._defaults = source.generation
        encode = partial(tokenizer.encode, add_special_tokens=False)
        config = source.config
        self._rules = RuleMaker(limits, config.vocab_size, config.hidden_size, end_ids(source, tokenizer), encode)

    def default_chat_params(self) -> SamplingParams:
        """SamplingParams with the values that the model's generation_config recommends."""
        defaults = self._defaults
        return SamplingParams().with_defaults(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        )

    def encode(self, prompt: Any) -> Encoded:
        """A prompt to be continued as it stands.

        Raises: RequestError when it is neither text nor a list of ids.
        """
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if is_list and all(issubclass(kind, int) and kind is not bool for kind in set(map(type, prompt))):
            return None, list(prompt)
        wanted = "a string or a list of token ids"
        got, change = f"{type(prompt).__name__} {prompt!r:.80}", "pass one of those"
        raise RequestError("prompt of the wrong type", param="prompt", got=got, wanted=wanted, change=change)

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Encoded:
        """A conversation, written by the model's chat template.

        Raises: RequestError when there is no template or it refuses.
        """
        text = self.render_chat(messages, tools)
        return text, self.tokenizer.encode(text, add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str:
        """The text of ``encode_chat``; raises as it does."""
        tokens = self.tokenizer
        return render(messages, tokens.chat_template, bos_token=tokens.bos_token, eos_token=tokens.eos_token, tools=tools)

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Raise RequestError, which calls them ``name``, where one of ``ids`` is none of the model's."""
        self._rules.check_ids(name, ids)

    def rules(self, ids: list[int], params: SamplingParams) -> list[TokenRules]:
        """What the token half needs to know of each answer.

        Raises: RequestError when such a request can never run.
        """
        return self._rules.rules(ids, params)

    def embed(self, request_id: str, encoded: Encoded, params: PoolingParams) -> tuple[TokenRules, EmbeddingRequest]:
        """Both halves of a prompt that becomes a vector.

        Raises: RequestError when such a request can never run.
        """
        text, ids = encoded
        rules = self._rules.pooling_rules(ids, params)
        return rules, EmbeddingRequest(RequestOutput(request_id, text, ids, []), params)

    def follow(self, request_id: str, encoded: Encoded, params: SamplingParams, *, continues: bool) -> list[TextRequest]:
        """The text half of each answer to a new request; ``continues`` as in TextRequest."""
        text, ids = encoded
        return follow(RequestOutput(request_id, text, ids, []), params, self.tokenizer, continues=continues)
