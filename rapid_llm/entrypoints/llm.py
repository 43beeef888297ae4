"""LLM: both halves of the engine in one process, as a Python object."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from rapid_llm.checkpoint.locate import locate
from rapid_llm.config import EngineConfig, PoolingParams, SamplingParams
from rapid_llm.engine.frontend import Encoded, Frontend, Message, Prompt, Tool, open_model
from rapid_llm.engine.output import RequestOutput
from rapid_llm.engine.request import Request
from rapid_llm.engine.stream import Follower, OutputReader
from rapid_llm.engine.text import TextRequest
from rapid_llm.engine.tokenizer import Tokenizer
from rapid_llm.entrypoints.compile_ahead import CompileAhead
from rapid_llm.entrypoints.early_context import begin_context
from rapid_llm.errors import RequestError
from rapid_llm.ledger import StartupLedger

if TYPE_CHECKING:
    from rapid_llm.checkpoint.source import CheckpointSource

_Prepared = tuple[TextRequest, Request]
"""An answer to come: its text half and its token half."""


class LLM:
    """A model ready to answer.

    Args:
        model: a folder in Hugging Face layout, a .gguf file, or a model of the Hugging Face hub by name, "org/name" or
            "org/name:file.gguf", from its cache or by download; None is the embedded SmolLM2-135M-Instruct.
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        dtype: "float32", "bfloat16", "float16"; None is float32 on a CPU and bfloat16 on a GPU.
        max_model_len: longest prompt plus answer in tokens; None is the model's own context.
        ledger: where start-up phases are noted; None starts a new one.
        progress: called while weights load with bytes done, bytes in all, seconds so far.
        download_progress: the same while a model is downloaded; called from another thread.
        options: the other fields of EngineConfig.

    Raises:
        ConfigError: a setting that is unknown or that this model or device cannot honour.
        CheckpointError: a checkpoint that is missing, broken or of a kind that is not read, or that cannot be downloaded.

    Methods may be called from several threads; their requests share the steps.
    """

    def __init__(
        self,
        model: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        *,
        ledger: StartupLedger | None = None,
        progress: Callable[[int, int, float], None] | None = None,
        download_progress: Callable[[int, int, float], None] | None = None,
        **options: Any,
    ) -> None:
        given = {"model": model, "device": device, "dtype": dtype, "max_model_len": max_model_len, **options}
        self.config = EngineConfig.from_options(given)
        self.ledger = StartupLedger() if ledger is None else ledger
        path = locate(self.config, self.ledger, download_progress)
        begin_context(self.config)
        # The file is opened and the tokenizer made while torch is imported: neither needs the other.
        with (
            CompileAhead(self.config, path, self.ledger) as compilers,
            ThreadPoolExecutor(1, thread_name_prefix="reader") as reader,
        ):
            opened: Future[tuple[CheckpointSource, Tokenizer]] = reader.submit(open_model, path, self.ledger)
            with self.ledger.phase("import torch"):
                from rapid_llm.build import build_engine
            source, self.tokenizer = opened.result()
            self._engine = build_engine(self.config, source, self.ledger, progress, compilers.wait, self.tokenizer)
        with self.ledger.phase("checks of requests"):
            self._frontend = Frontend(source, self.tokenizer, self._engine.config)
        self._live: dict[str, Follower] = {}
        self._numbers = count()
        self._lock = threading.RLock()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt as it stands.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all, or one for each; None is SamplingParams().

        Returns: one output a prompt, in their order.
        Raises: RequestError when any prompt or value is refused; then none has run.
        """
        each = [prompts] if is_single_prompt(prompts) else list(prompts)
        encoded = [self._frontend.encode(prompt) for prompt in each]
        return self._run(encoded, self._params_for(len(each), params, SamplingParams()), continues=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the model's chat template.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], or a list of such lists.
            params: for all, or one for each; None takes the sampling values of the model's generation_config.
            tools: functions that the model may call, shown to it by its template; in every conversation the same.

        Returns: one output a conversation, in their order. A call that the model makes is part of the text.
        Raises: RequestError when anything is refused; then none has run.
        """
        each: list[Any] = [messages] if is_conversation(messages) else list(messages)
        encoded = [self._frontend.encode_chat(conversation, tools) for conversation in each]
        return self._run(encoded, self._params_for(len(each), params, self.default_chat_params()), continues=False)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the output as it grows: a conversation goes through the chat template, anything else is continued as it stands.

        Each item is a state of its own: ``.outputs[0].text`` is everything so far, ``.outputs[0].delta`` what is new since the
        item before; with ``n`` answers each has its own. The request begins with the first item that is asked for, and goes on
        in the steps of others, too; leaving the loop ends it. ``tools`` go with a conversation only, as in ``chat``.

        Raises: RequestError at once, before anything is yielded, when anything is refused.
        """
        chats = is_conversation(prompt)
        if chats:
            encoded, default = self._frontend.encode_chat(cast("Sequence[Message]", prompt), tools), self.default_chat_params()
        elif tools is not None:
            change = "send a list of messages, or leave the tools out"
            raise RequestError("tools need a conversation", got=type(prompt).__name__, wanted="messages", change=change)
        else:
            encoded, default = self._frontend.encode(prompt), SamplingParams()
        [params] = self._params_for(1, params, default)
        return self._follow(self._prepare([encoded], [params], continues=not chats))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "last",
        *,
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> list[RequestOutput]:
        """Turn each prompt into a vector: the model's own hidden states, which mean most where it was trained to give some.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            pooling, normalize, dimensions: as in PoolingParams.

        Returns: one output a prompt, in their order, with ``embedding``, and no answers.
        Raises: RequestError when any prompt or value is refused; then none has run.
        """
        params = PoolingParams(pooling, normalize, dimensions)
        each = [prompts] if is_single_prompt(prompts) else list(prompts)
        encoded = [self._frontend.encode(prompt) for prompt in each]
        pairs = [self._frontend.embed(str(next(self._numbers)), one, params) for one in encoded]
        prepared = [(its, Request(its.id, list(ids), rules)) for (_, ids), (rules, its) in zip(encoded, pairs, strict=True)]
        self._finish(prepared)
        return [its.output for its, _ in prepared]

    def default_chat_params(self) -> SamplingParams:
        """SamplingParams with the values that the model's generation_config recommends."""
        return self._frontend.default_chat_params()

    def _follow(self, prepared: list[_Prepared]) -> Iterator[RequestOutput]:
        """Queue the request when the first item is asked for: an iterator that nobody begins is never told that it was left."""
        answers = [answer for answer, _ in prepared]
        output, reader, said = answers[0].output, OutputReader(answers), 0
        try:
            self._queue(prepared)
            while True:
                while not output.finished and _num_tokens(output) <= said:
                    self._step()
                with self._lock:
                    state = reader.state()
                said = _num_tokens(state)
                yield state
                if state.finished:
                    return
        finally:
            self._drop(answers)

    def _run(self, encoded: list[Encoded], params: list[SamplingParams], *, continues: bool) -> list[RequestOutput]:
        prepared = self._prepare(encoded, params, continues=continues)
        self._finish(prepared)
        return [answer.output for answer, _ in prepared if answer.answer.index == 0]

    def _finish(self, prepared: Sequence[tuple[Follower, Request]]) -> None:
        """Run until all of them have ended."""
        followers = [follower for follower, _ in prepared]
        try:
            self._queue(prepared)
            while not all(follower.finished for follower in followers):
                self._step()
        finally:
            self._drop(followers)

    def _prepare(self, encoded: list[Encoded], params: list[SamplingParams], *, continues: bool) -> list[_Prepared]:
        """Both halves of all answers to all prompts. Raises where one can never run."""
        prepared: list[_Prepared] = []
        for (text, ids), its in zip(encoded, params, strict=True):
            rules = self._frontend.rules(ids, its)
            if its.grammar is not None and self._engine.grammars is not None:
                self._engine.grammars.check(its.grammar)
            answers = self._frontend.follow(str(next(self._numbers)), (text, ids), its, continues=continues)
            prepared += [(one, Request(one.id, list(ids), its_rules)) for one, its_rules in zip(answers, rules, strict=True)]
        return prepared

    def _queue(self, prepared: Sequence[tuple[Follower, Request]]) -> None:
        with self._lock:
            for answer, request in prepared:
                self._live[answer.id] = answer
                self._engine.add(request)

    def _step(self) -> None:
        """Run one step for everybody and bring each request its share."""
        starting = self.ledger.phase("first request") if self.ledger.first_token is None else nullcontext()
        with self._lock, starting:
            for update in self._engine.step():
                request = self._live[update.request_id]
                if update.token is not None:
                    self.ledger.mark_first_token()
                if request.take(update):
                    self._engine.abort(update.request_id)
            while self._engine.refused:
                request_id, error = self._engine.refused.popitem()
                self._live[request_id].fail(error)

    def _drop(self, answers: Sequence[Follower]) -> None:
        with self._lock:
            for answer in answers:
                self._live.pop(answer.id, None)
                if not answer.finished:
                    self._engine.abort(answer.id)

    @staticmethod
    def _params_for(number: int, params: Any, default: SamplingParams) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or default] * number
        each = list(params)
        if len(each) != number or not all(isinstance(one, SamplingParams) for one in each):
            got, wanted = f"{len(each)} values", f"one SamplingParams, or {number} of them"
            raise RequestError("params do not match the prompts", got=got, wanted=wanted, change="pass one for each prompt")
        return each


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(answer.token_ids) for answer in output.outputs)


def is_single_prompt(prompts: Any) -> bool:
    """Whether ``prompts`` is one prompt: a text or a list of ids (an empty list is an empty prompt)."""
    return not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes) or not prompts or isinstance(prompts[0], int)


def is_conversation(messages: Any) -> bool:
    """Whether ``messages`` is one conversation, and neither several nor a prompt."""
    return isinstance(messages, Sequence) and not isinstance(messages, str) and (not messages or isinstance(messages[0], Mapping))
