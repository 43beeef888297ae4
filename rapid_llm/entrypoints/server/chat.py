"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from rapid_llm.engine.output import CompletionOutput, RequestOutput
from rapid_llm.entrypoints.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatRequest,
)
from rapid_llm.entrypoints.protocol.usage import Usage
from rapid_llm.entrypoints.server.bodies import read_for_model
from rapid_llm.entrypoints.server.chat_plan import ChatPlan, plan_chat
from rapid_llm.entrypoints.server.exchange import DONE, Exchange, event
from rapid_llm.entrypoints.server.logprobs import chat_logprobs
from rapid_llm.entrypoints.server.message import MessageReader
from rapid_llm.entrypoints.server.naming import Naming
from rapid_llm.entrypoints.server.refusals import body_of
from rapid_llm.errors import RapidError

if TYPE_CHECKING:
    from rapid_llm.engine.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


async def chat_completions(request: Request) -> Exchange:
    """Answer a conversation."""
    serving, ask, llm = await read_for_model(request, ChatRequest)
    frontend = await llm.frontend()
    plan = await plan_chat(ask, frontend, serving.config.tool_format)
    writer = ChatWriter(ask, plan, Naming.of(request, serving, "chatcmpl", ask.ignored), frontend.tokenizer)
    streams = [llm.chat(plan.messages, plan.params, plan.tools)]
    return Exchange(serving, streams, plan.params.n, writer, is_stream=bool(ask.stream), renamed=plan.renamed)


class ChatWriter:
    """Answers as chat completions."""

    def __init__(self, ask: ChatRequest, plan: ChatPlan, naming: Naming, tokenizer: "Tokenizer") -> None:
        self._most, self._naming, self._tokenizer = plan.params.logprobs or 0, naming, tokenizer
        self._readers = [MessageReader(plan.parser(), plan.most_calls) for _ in range(plan.params.n)]
        self._usage = None if ask.includes_usage else UNSET
        self._counts_tokens, self._counts_always = ask.includes_usage, ask.counts_always
        self._seen: dict[int, int] = {}
        self._ended: set[int] = set()

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The body of an answer that is sent at once."""
        [output] = outputs
        choices = [self._choice(answer) for answer in output.outputs]
        scores = UNSET if output.prompt_logprobs is None else output.prompt_logprobs
        return _encode(ChatCompletion(**self._naming.fields, choices=choices, usage=Usage.of(outputs), prompt_logprobs=scores))

    def begin(self) -> bytes:
        """Nothing: the first piece says the role."""
        return b""

    def piece(self, place: int, output: RequestOutput) -> bytes:
        """An event for each answer that has grown."""
        return b"".join(self._grown(answer, output) for answer in output.outputs)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The chunk that counts tokens, and the end."""
        counts = b""
        if self._counts_tokens:
            counts = event(_encode(ChatCompletionChunk(**self._naming.fields, choices=[], usage=Usage.of(outputs))))
        return counts + DONE

    def failure(self, error: RapidError) -> bytes:
        """An error event, and the end."""
        return event(body_of(error)) + DONE

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        reader = self._readers[answer.index]
        message = reader.whole(answer)
        logprobs = chat_logprobs(answer, 0, self._most, self._tokenizer)
        return ChatChoice(answer.index, message, reader.finish_reason(answer) or "", logprobs, answer.stop_reason)

    def _grown(self, answer: CompletionOutput, output: RequestOutput) -> bytes:
        seen, is_first = self._seen.get(answer.index, 0), answer.index not in self._seen
        is_news = len(answer.token_ids) > seen or answer.delta or answer.finish_reason is not None
        if answer.index in self._ended or not is_news:
            return b""
        self._seen[answer.index] = len(answer.token_ids)
        reader = self._readers[answer.index]
        delta = reader.take(answer)
        if answer.finish_reason is not None:
            self._ended.add(answer.index)
        elif delta == ChatDelta() and answer.logprobs is None and not is_first:
            return b""  # a token whose text is not known yet, or may be the beginning of a mark
        if is_first:
            delta.role, delta.content = "assistant", delta.content or ""
        choice = ChatChunkChoice(
            answer.index,
            delta,
            reader.finish_reason(answer),
            chat_logprobs(answer, seen, self._most, self._tokenizer),
            UNSET if answer.stop_reason is None else answer.stop_reason,
        )
        scores = output.prompt_logprobs if is_first and answer.index == 0 and output.prompt_logprobs is not None else UNSET
        usage = Usage.of([output]) if self._counts_always else self._usage
        chunk = ChatCompletionChunk(**self._naming.fields, choices=[choice], usage=usage, prompt_logprobs=scores)
        return event(_encode(chunk))
