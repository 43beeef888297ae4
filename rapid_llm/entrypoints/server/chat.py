"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from rapid_llm.config import SamplingParams
from rapid_llm.engine.output import CompletionOutput, RequestOutput
from rapid_llm.entrypoints.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatRequest,
)
from rapid_llm.entrypoints.protocol.errors import ErrorBody
from rapid_llm.entrypoints.protocol.fields import field_values, sampling_params
from rapid_llm.entrypoints.protocol.formats import format_grammar
from rapid_llm.entrypoints.protocol.usage import Usage
from rapid_llm.entrypoints.server.bodies import read
from rapid_llm.entrypoints.server.exchange import Exchange, event
from rapid_llm.entrypoints.server.logprobs import chat_logprobs
from rapid_llm.entrypoints.server.naming import Naming
from rapid_llm.entrypoints.server.refusals import detail_of
from rapid_llm.entrypoints.server.serving import Serving
from rapid_llm.errors import RapidError, RequestError

if TYPE_CHECKING:
    from rapid_llm.engine.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


async def chat_completions(request: Request) -> Exchange:
    """Answer a conversation."""
    serving: Serving = request.app.state.serving
    llm = serving.llm()
    ask = await read(request, ChatRequest, serving.config.max_body_bytes)
    llm, frontend = serving.llm(ask.model), await llm.frontend()
    params = _params(ask, frontend.default_chat_params())
    messages = [message.for_template() for message in ask.messages]
    writer = ChatWriter(ask, params, Naming.of(request, serving, "chatcmpl", ask.ignored), frontend.tokenizer)
    streams = [llm.chat(messages, params)]
    renamed = {"": "messages", "prompt": "messages", **({} if ask.grammar else {"grammar": "response_format"})}
    return Exchange(serving, streams, params.n, writer, is_stream=bool(ask.stream), renamed=renamed)


def _params(ask: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    if ask.top_logprobs is not None and not ask.logprobs:
        wanted, change = "logprobs true with it", "set logprobs, or leave top_logprobs out"
        raise RequestError(
            "top_logprobs has no effect alone", param="top_logprobs", got=str(ask.top_logprobs), wanted=wanted, change=change
        )
    fields = field_values(ask)
    if ask.max_completion_tokens is not None:
        if ask.max_tokens not in (None, ask.max_completion_tokens):
            problem, change = "max_tokens and max_completion_tokens contradict each other", "send one of them"
            got = f"{ask.max_tokens} and {ask.max_completion_tokens}"
            raise RequestError(problem, param="max_tokens", got=got, change=change)
        fields["max_tokens"] = ask.max_completion_tokens
    more = format_grammar(ask.response_format, ask.grammar, "response_format")
    return sampling_params(fields, defaults, logprobs=(ask.top_logprobs or 0) if ask.logprobs else None, **more)


class ChatWriter:
    """Answers as chat completions."""

    def __init__(self, ask: ChatRequest, params: SamplingParams, naming: Naming, tokenizer: "Tokenizer") -> None:
        self._most, self._naming, self._tokenizer = params.logprobs or 0, naming, tokenizer
        self._usage = None if ask.includes_usage else UNSET
        self._counts_tokens = ask.includes_usage
        self._seen: dict[int, int] = {}
        self._ended: set[int] = set()

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The body of an answer that is sent at once."""
        [output] = outputs
        choices = [
            ChatChoice(
                answer.index,
                AnswerMessage(answer.text),
                answer.finish_reason or "",
                chat_logprobs(answer, 0, self._most, self._tokenizer),
                answer.stop_reason,
            )
            for answer in output.outputs
        ]
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
        return counts + event(b"[DONE]")

    def failure(self, error: RapidError) -> bytes:
        """An error event, and the end."""
        return event(_encode(ErrorBody(detail_of(error)))) + event(b"[DONE]")

    def _grown(self, answer: CompletionOutput, output: RequestOutput) -> bytes:
        seen, is_first = self._seen.get(answer.index, 0), answer.index not in self._seen
        is_news = len(answer.token_ids) > seen or answer.delta or answer.finish_reason is not None
        if answer.index in self._ended or not is_news:
            return b""
        self._seen[answer.index] = len(answer.token_ids)
        if answer.finish_reason is not None:
            self._ended.add(answer.index)
        elif not answer.delta and answer.logprobs is None and not is_first:
            return b""  # a token whose text is not known yet
        delta = ChatDelta("assistant" if is_first else None, answer.delta if answer.delta or is_first else None)
        choice = ChatChunkChoice(
            answer.index,
            delta,
            answer.finish_reason,
            chat_logprobs(answer, seen, self._most, self._tokenizer),
            UNSET if answer.stop_reason is None else answer.stop_reason,
        )
        scores = output.prompt_logprobs if is_first and answer.index == 0 and output.prompt_logprobs is not None else UNSET
        chunk = ChatCompletionChunk(**self._naming.fields, choices=[choice], usage=self._usage, prompt_logprobs=scores)
        return event(_encode(chunk))
