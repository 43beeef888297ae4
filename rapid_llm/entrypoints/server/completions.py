"""POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from rapid_llm.config import MAX_ANSWERS, SamplingParams
from rapid_llm.engine.output import CompletionOutput, RequestOutput
from rapid_llm.entrypoints.protocol.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from rapid_llm.entrypoints.protocol.fields import field_values, sampling_params
from rapid_llm.entrypoints.protocol.usage import Usage
from rapid_llm.entrypoints.server.bodies import read_for_model
from rapid_llm.entrypoints.server.exchange import DONE, Exchange, event
from rapid_llm.entrypoints.server.logprobs import CompletionLogprobsWriter
from rapid_llm.entrypoints.server.naming import Naming
from rapid_llm.entrypoints.server.prompts import prompts_of
from rapid_llm.entrypoints.server.refusals import body_of
from rapid_llm.errors import RapidError, RequestError

if TYPE_CHECKING:
    from rapid_llm.engine.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


async def completions(request: Request) -> Exchange:
    """Continue prompts as they stand."""
    serving, ask, llm = await read_for_model(request, CompletionRequest)
    frontend = await llm.frontend()
    prompts, params = prompts_of("prompt", ask.prompt), _params(ask)
    if len(prompts) * params.n > MAX_ANSWERS:
        got, wanted = f"{len(prompts)} prompts with n {params.n}", f"at most {MAX_ANSWERS} answers in all"
        raise RequestError("prompt is out of range", param="prompt", got=got, wanted=wanted, change="send several requests")
    naming = Naming.of(request, serving, "cmpl", ask.ignored)
    writer = CompletionWriter(ask, params, naming, frontend.tokenizer)
    streams = [llm.generate(prompt, params) for prompt in prompts]
    return Exchange(serving, streams, len(prompts) * params.n, writer, is_stream=bool(ask.stream), renamed={"": "prompt"})


def _params(ask: CompletionRequest) -> SamplingParams:
    # The model's words on the prompt alone: one token is drawn all the same, and is not told.
    more = {"max_tokens": 1} if _is_echo_alone(ask) else {}
    params = sampling_params(field_values(ask), SamplingParams(), logprobs=ask.logprobs, **more)
    if ask.echo and params.logprobs is not None:
        return params.with_defaults(prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))
    return params


def _is_echo_alone(ask: CompletionRequest) -> bool:
    return bool(ask.echo) and ask.max_tokens == 0


def _without_answer(output: RequestOutput) -> RequestOutput:
    """The prompt alone, as the answer of no tokens to it."""
    outputs = [
        CompletionOutput(
            answer.index, finish_reason=answer.finish_reason and "length", logprobs=None if answer.logprobs is None else []
        )
        for answer in output.outputs
    ]
    return replace(output, outputs=outputs)


class CompletionWriter:
    """Answers as text completions; the answers to prompt p are numbers p * n to p * n + n - 1."""

    def __init__(self, ask: CompletionRequest, params: SamplingParams, naming: Naming, tokenizer: "Tokenizer") -> None:
        self._params, self._naming, self._tokenizer = params, naming, tokenizer
        self._echoes, self._counts_tokens, self._counts_always = bool(ask.echo), ask.includes_usage, ask.counts_always
        self._shows_scores, self._is_echo_alone = ask.prompt_logprobs is not None, _is_echo_alone(ask)
        self._usage = None if ask.includes_usage else UNSET
        self._answers: dict[int, _Answer] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The body of an answer that is sent at once."""
        outputs = [self._shown(output) for output in outputs]
        choices = [
            self._choice(place, answer, output, answer.text) for place, output in enumerate(outputs) for answer in output.outputs
        ]
        return _encode(Completion(**self._naming.fields, choices=choices, usage=Usage.of(outputs)))

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def piece(self, place: int, output: RequestOutput) -> bytes:
        """An event for each answer that has grown."""
        output = self._shown(output)
        grown = [(answer, self._answer(place, answer)) for answer in output.outputs]
        choices = [self._choice(place, answer, output, answer.delta) for answer, its in grown if its.is_news(answer)]
        usage = Usage.of([output]) if self._counts_always else self._usage
        chunks = [Completion(**self._naming.fields, choices=[choice], usage=usage) for choice in choices]
        return b"".join(event(_encode(chunk)) for chunk in chunks)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The chunk that counts tokens, and the end."""
        counts = b""
        if self._counts_tokens:
            usage = Usage.of([self._shown(output) for output in outputs])
            counts = event(_encode(Completion(**self._naming.fields, choices=[], usage=usage)))
        return counts + DONE

    def failure(self, error: RapidError) -> bytes:
        """An error event, and the end."""
        return event(body_of(error)) + DONE

    def _shown(self, output: RequestOutput) -> RequestOutput:
        return _without_answer(output) if self._is_echo_alone else output

    def _answer(self, place: int, answer: CompletionOutput) -> "_Answer":
        number = place * self._params.n + answer.index
        if number not in self._answers:
            self._answers[number] = _Answer(CompletionLogprobsWriter(self._params.logprobs or 0, self._tokenizer))
        return self._answers[number]

    def _choice(self, place: int, answer: CompletionOutput, output: RequestOutput, text: str) -> CompletionChoice:
        """What is new of an answer, the echo before it if it is the first."""
        its = self._answer(place, answer)
        if self._echoes and not its.has_begun:
            text = self._prompt_text(output) + text
        shows_scores = self._shows_scores and not its.has_begun and answer.index == 0
        scores = (output.prompt_logprobs or []) if shows_scores else UNSET
        logprobs = self._logprobs(its, answer, output)
        its.note(answer)
        index = place * self._params.n + answer.index
        return CompletionChoice(index, text, answer.finish_reason, logprobs, answer.stop_reason, scores)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, self._params.skip_special_tokens)

    def _logprobs(self, its: "_Answer", answer: CompletionOutput, output: RequestOutput) -> CompletionLogprobs | None:
        if answer.logprobs is None:
            return None
        token_ids, entries = answer.token_ids[its.num_told :], list(answer.logprobs[its.num_told :])
        if answer.ending is not None:  # who sums up log-probs leaves the last one out, as OpenAI's completions bring it too
            token_ids, entries = [*token_ids, answer.ending[0]], [*entries, answer.ending[1]]
        if self._echoes and not its.has_begun:
            token_ids = output.prompt_token_ids + token_ids
            entries = [*(output.prompt_logprobs or ()), *entries]
        return its.logprobs.lists(token_ids, entries)


class _Answer:
    """How much of one answer has been told."""

    def __init__(self, logprobs: CompletionLogprobsWriter) -> None:
        self.logprobs = logprobs
        self.num_told = 0
        self.has_begun = self._has_ended = False

    def is_news(self, answer: CompletionOutput) -> bool:
        """Whether there is something to tell."""
        has_ended = answer.finish_reason is not None and not self._has_ended
        says_more = bool(answer.delta) or (answer.logprobs is not None and len(answer.token_ids) > self.num_told)
        return has_ended or says_more

    def note(self, answer: CompletionOutput) -> None:
        """All of ``answer`` has been told."""
        self.num_told = len(answer.token_ids)
        self.has_begun, self._has_ended = True, answer.finish_reason is not None
