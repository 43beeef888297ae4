"""The token half of the engine: add requests, run steps, hand out ids. It knows no text and no tensor."""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rapid_llm.config import ResolvedConfig, pages_for
from rapid_llm.engine.grammar import Allowed, Constraint, Grammars
from rapid_llm.engine.request import FinishReason, Request, TokenOutput
from rapid_llm.engine.scheduler import ScheduledStep, Scheduler
from rapid_llm.errors import RequestError
from rapid_llm.kernels.dispatcher.served_kernel import ServedKernel
from rapid_llm.step import NO_NUMBER, NO_WAY_ON, SampledToken, StepPlan, StepResult

_MASK_SECONDS = 0.0005
"""How long a step waits for masks of requests that run: most take a fifth of it."""
_IDLE_SECONDS = 0.02
"""How long one waits that has nothing else to do, before messages are looked at again."""


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
    """Continuous batching over one worker: ``add``, ``step`` until ``has_work`` is false, ``abort`` at any time.

    Args:
        grammars: follows those of requests; None where none are served.
        served_kernels: explains which kernels the worker launches; none where it launches none.

    Attributes:
        refused: requests that turned out to be impossible once their grammar was looked at, and why; emptied by who tells them.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        worker: StepWorker,
        grammars: Grammars | None = None,
        served_kernels: Callable[[], list[ServedKernel]] = list,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.worker, self.grammars, self.served_kernels = worker, grammars, served_kernels
        self.refused: dict[str, RequestError] = {}
        self._constraints: dict[str, Constraint] = {}
        self._unmasked: dict[str, Request] = {}  # those that wait for a mask, in the order in which they began to
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[ScheduledStep, PendingStep]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a call of step() can bring something."""
        return bool(self._requests or self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no slot: in the queue, or before it while their grammar is compiled."""
        before = sum(not self._constraints[name].is_compiled for name in self._unmasked)
        return before + len(self.scheduler.waiting)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run here: an empty prompt, past the context, or larger than the KV pool; a grammar where
                none are served. One that cannot be used is found out later: see ``refused``.
        """
        check_fits(self.config, request.prompt_len, request.rules.max_new_tokens)
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in use", change="choose another id")
        if request.rules.grammar is None:
            self.scheduler.add(request)
        elif self.grammars is None:
            raise RequestError("this engine serves no grammars", got=request.rules.grammar.kind, change="leave grammar out")
        else:  # queued when its first mask is there, so that it takes no slot before
            may_end = bool(request.rules.end_ids)
            self._constraints[request.id] = self.grammars.follow(request.rules.grammar, may_end=may_end)
            self._unmasked[request.id] = request
        self._requests[request.id] = request

    def abort(self, request_id: str) -> None:
        """End a request at once; unknown or finished ids are no error, since an abort may cross the last output."""
        request = self._requests.get(request_id)
        if request is not None:
            request.finish_reason = "abort"
            self._drop(request)

    def step(self) -> list[TokenOutput]:
        """Submit the next step and return what the one before it brought (the same one, where the worker does not overlap)."""
        outputs = self._take_masks() if self._unmasked else []
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self._in_flight.append((scheduled, self.worker.submit(scheduled.plan)))
        if not self._in_flight or (scheduled is not None and len(self._in_flight) <= self.worker.depth):
            return outputs
        done, pending = self._in_flight.popleft()
        return outputs + self._finish(done, pending.result())

    def _take_masks(self) -> list[TokenOutput]:
        """Let those run whose mask has come. One whose grammar allows nothing more has ended."""
        self._await_masks()
        outputs = []
        for request in list(self._unmasked.values()):
            constraint = self._constraints[request.id]
            was_queued = constraint.is_compiled
            try:
                allowed = constraint.poll()
            except RequestError as error:
                self.refused[request.id] = error
                request.finish_reason = "abort"
                self._drop(request)
                continue
            if allowed is None:
                continue
            del self._unmasked[request.id]
            if allowed.is_complete or allowed.problem:
                request.finish_reason = "stop" if allowed.is_complete else "abort"
                self._drop(request)  # what it computed is sound, whatever became of its text
                outputs.append(_last_output(request, allowed))
                continue
            request.mask = allowed.mask
            if not was_queued:
                self.scheduler.add(request)
        return outputs

    def _await_masks(self) -> None:
        """Wait a moment for the masks of those that run, or for any mask where there is nothing else to do."""
        if self.grammars is None:
            return
        is_idle = not self._in_flight and len(self._unmasked) == len(self._requests)
        if is_idle:
            self.grammars.await_news(_IDLE_SECONDS)
            return
        running = [self._constraints[name] for name in self._unmasked if self._constraints[name].is_compiled]
        end = time.monotonic() + _MASK_SECONDS
        while not all(constraint.is_ready for constraint in running) and (left := end - time.monotonic()) > 0:
            self.grammars.await_news(left)

    def _finish(self, step: ScheduledStep, result: StepResult) -> list[TokenOutput]:
        """Give each sampled id to its request. A surplus id of a request that ended meanwhile is dropped."""
        self.scheduler.collect(step, result)
        outputs = []
        for slot, request in step.scored.items():
            if request.finish_reason is None:
                outputs.append(self._take_prompt(request, result.scored[slot]))
        for slot, request in step.pooled.items():
            if request.finish_reason is None:
                outputs.append(self._take_vector(request, result.vectors[slot]))
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

    def _take_vector(self, request: Request, vector: bytes) -> TokenOutput:
        request.finish_reason = "stop" if vector else "error"
        self._drop(request)
        failure, cached = 0 if vector else NO_NUMBER, request.num_cached_tokens
        return TokenOutput(request.id, None, request.finish_reason, vector=vector, failure=failure, num_cached_tokens=cached)

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
            elif request.rules.grammar is not None:
                self._constraints[request.id].take(token.token_id)
                self._unmasked[request.id] = request
        kept = token if request.finish_reason in (None, "length") else None
        ending = token if request.finish_reason == "stop" else None
        if request.finish_reason is not None:
            self._drop(request)
        failure = min(token.token_id, 0)
        return TokenOutput(
            request.id,
            kept,
            request.finish_reason,
            stop_id,
            num_cached_tokens=request.num_cached_tokens,
            queue_seconds=request.queue_seconds,
            ending=ending,
            failure=failure,
        )

    def _drop(self, request: Request) -> None:
        del self._requests[request.id]
        self._unmasked.pop(request.id, None)
        self._constraints.pop(request.id, None)
        self.scheduler.finish(request)


def _last_output(request: Request, allowed: Allowed) -> TokenOutput:
    """Of a request whose grammar allows nothing more."""
    reason: FinishReason = "stop" if allowed.is_complete else "error"
    failure = 0 if allowed.is_complete else NO_WAY_ON
    return TokenOutput(request.id, None, reason, num_cached_tokens=request.num_cached_tokens, failure=failure)


def check_fits(config: ResolvedConfig, prompt_len: int, max_new_tokens: int) -> None:
    """Raise RequestError when a request of these lengths can never run: nothing, past the context, past the pool."""
    if prompt_len == 0:
        change = "send a prompt"
        raise RequestError("the prompt is empty", param="prompt", got="0 tokens", wanted="at least 1", change=change)
    if prompt_len + (max_new_tokens > 0) > config.max_model_len:
        room = f"{config.max_model_len - 1}, which leaves room for one new token" if max_new_tokens else str(config.max_model_len)
        got, wanted = f"{prompt_len} tokens", f"at most {room}"
        raise _too_long("the prompt is longer than the context", "prompt", got, wanted, "shorten it or raise max_model_len")
    if prompt_len + max_new_tokens > config.max_model_len:
        got, wanted = f"{prompt_len} prompt tokens + max_tokens {max_new_tokens}", f"at most {config.max_model_len} together"
        raise _too_long("prompt and answer are longer than the context", "max_tokens", got, wanted, "lower max_tokens")
    # The last sampled id is never fed back, so it needs no row.
    if pages_for(prompt_len + max(max_new_tokens - 1, 0)) > config.num_pages:
        got, wanted = f"{prompt_len} prompt tokens + {max_new_tokens} new ones", f"at most {config.max_kv_tokens + 1} together"
        change, param = "lower max_tokens or raise max_kv_tokens", "max_tokens"
        if not max_new_tokens:
            got, wanted = f"{prompt_len} tokens", f"at most {config.max_kv_tokens}"
            change, param = "shorten it or raise max_kv_tokens", "prompt"
        raise _too_long("the request does not fit the KV pool", param, got, wanted, change)


def _too_long(problem: str, param: str, got: str, wanted: str, change: str) -> RequestError:
    return RequestError(problem, param=param, code="context_length_exceeded", got=got, wanted=wanted, change=change)
