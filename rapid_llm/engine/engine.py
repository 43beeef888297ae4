"""The token half of the engine: add requests, run steps, hand out ids. It knows no text and no tensor."""

from collections import deque
from typing import Protocol

from rapid_llm.config import ResolvedConfig, pages_for
from rapid_llm.engine.request import Request, TokenOutput
from rapid_llm.engine.scheduler import ScheduledStep, Scheduler
from rapid_llm.errors import RequestError
from rapid_llm.step import NO_NUMBER, SampledToken, StepPlan, StepResult


class PendingStep(Protocol):
    """A step that was submitted."""

    def result(self) -> StepResult:
        """Wait for the sampled ids."""


class StepWorker(Protocol):
    """Runs plans, in the order they are submitted.

    Attributes:
        depth: steps that may be in flight while the next is planned: 0 where submitting already runs the step (a CPU).
        num_compiles: kernels that were compiled or loaded since the worker was ready: none, if all is well.
    """

    depth: int
    num_compiles: int

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step."""


class Engine:
    """Continuous batching over one worker: ``add``, ``step`` until ``has_work`` is false, ``abort`` at any time."""

    def __init__(self, config: ResolvedConfig, worker: StepWorker) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.worker = worker
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[ScheduledStep, PendingStep]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a call of step() can bring something."""
        return bool(self._requests or self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run here: an empty prompt, past the context, or larger than the KV pool.
        """
        check_fits(self.config, request.prompt_len, request.rules.max_new_tokens)
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in use", change="choose another id")
        self._requests[request.id] = request
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request at once; unknown or finished ids are no error, since an abort may cross the last output."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.finish_reason = "abort"
            self.scheduler.finish(request)

    def step(self) -> list[TokenOutput]:
        """Submit the next step and return what the one before it brought (the same one, where the worker does not overlap)."""
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self._in_flight.append((scheduled, self.worker.submit(scheduled.plan)))
        if not self._in_flight or (scheduled is not None and len(self._in_flight) <= self.worker.depth):
            return []
        done, pending = self._in_flight.popleft()
        return self._finish(done, pending.result())

    def _finish(self, step: ScheduledStep, result: StepResult) -> list[TokenOutput]:
        """Give each sampled id to its request. A surplus id of a request that ended meanwhile is dropped."""
        self.scheduler.collect(step, result)
        outputs = []
        for slot, request in step.scored.items():
            if request.finish_reason is None:
                outputs.append(self._take_prompt(request, result.scored[slot]))
        for slot, request in step.sampled.items():
            request.num_in_flight -= 1
            if request.finish_reason is None:
                outputs.append(self._take(request, result.tokens[slot]))
        return outputs

    def _take_prompt(self, request: Request, tokens: tuple[SampledToken, ...]) -> TokenOutput:
        if all(token.logprob_ids[0] >= 0 for token in tokens):
            return TokenOutput(request.id, None, None, prompt=tokens, num_cached_tokens=request.num_cached_tokens)
        request.finish_reason = "error"
        self._drop(request)
        cached = request.num_cached_tokens
        return TokenOutput(request.id, None, "error", failure=NO_NUMBER, num_cached_tokens=cached)

    def _take(self, request: Request, token: SampledToken) -> TokenOutput:
        stop_id = None
        if token.token_id < 0:
            request.finish_reason = "error"
        elif token.token_id in request.rules.end_ids or token.token_id in request.rules.stop_ids:
            request.finish_reason = "stop"
            stop_id = token.token_id if token.token_id in request.rules.stop_ids else None
        else:
            request.token_ids.append(token.token_id)
            if len(request.token_ids) - request.prompt_len >= request.rules.max_new_tokens:
                request.finish_reason = "length"
        kept = token if request.finish_reason in (None, "length") else None
        if request.finish_reason is not None:
            self._drop(request)
        failure = min(token.token_id, 0)
        return TokenOutput(
            request.id, kept, request.finish_reason, stop_id, num_cached_tokens=request.num_cached_tokens, failure=failure
        )

    def _drop(self, request: Request) -> None:
        del self._requests[request.id]
        self.scheduler.finish(request)


def check_fits(config: ResolvedConfig, prompt_len: int, max_new_tokens: int) -> None:
    """Raise RequestError when a request of these lengths can never run: nothing, past the context, past the pool."""
    if prompt_len == 0:
        change = "send a prompt"
        raise RequestError("the prompt is empty", param="prompt", got="0 tokens", wanted="at least 1", change=change)
    if prompt_len >= config.max_model_len:
        got, wanted = f"{prompt_len} tokens", f"at most {config.max_model_len - 1}, which leaves room for one new token"
        raise _too_long("the prompt is longer than the context", "prompt", got, wanted, "shorten it or raise max_model_len")
    if prompt_len + max_new_tokens > config.max_model_len:
        got, wanted = f"{prompt_len} prompt tokens + max_tokens {max_new_tokens}", f"at most {config.max_model_len} together"
        raise _too_long("prompt and answer are longer than the context", "max_tokens", got, wanted, "lower max_tokens")
    # The last sampled id is never fed back, so it needs no row.
    if pages_for(prompt_len + max_new_tokens - 1) > config.num_pages:
        got, wanted = f"{prompt_len} prompt tokens + {max_new_tokens} new ones", f"at most {config.max_kv_tokens + 1} together"
        change = "lower max_tokens or raise max_kv_tokens"
        raise _too_long("the request does not fit the KV pool", "max_tokens", got, wanted, change)


def _too_long(problem: str, param: str, got: str, wanted: str, change: str) -> RequestError:
    return RequestError(problem, param=param, code="context_length_exceeded", got=got, wanted=wanted, change=change)
