"""What /metrics tells: the server's own counts, and the engine's as they are when it is asked."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from rapid_llm.engine.messages import STEP_BOUNDS, Stats
from rapid_llm.engine.output import RequestOutput

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """The counts of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._engine = EngineCollector()
        registry.register(self._engine)
        ends = "Requests that have ended, by how: stop, length, error, or abort when the client had left"
        self.requests = Counter("rapid_llm_requests", ends, ["finish_reason"], registry=registry)
        answers = "Answers to requests of HTTP, refusals and probes among them; 0 where the client left before there was one"
        self.http_answers = Counter("rapid_llm_http_answers", answers, ["status"], registry=registry)
        self.prompt_tokens = Counter("rapid_llm_prompt_tokens", "Tokens of prompts", registry=registry)
        self.generated_tokens = Counter("rapid_llm_generated_tokens", "Tokens of answers", registry=registry)
        self.ttft = _seconds("time_to_first_token", "From a request to its first token", _SECONDS, registry)
        self.queue = _seconds("queue", "From a request to the first step that computes it", _SECONDS, registry)
        self.tpot = _seconds("time_per_output_token", "Between two tokens of an answer, on average", _TOKEN_SECONDS, registry)
        self.latency = _seconds("request", "From a request to the end of its answer", _SECONDS, registry)

    @contextmanager
    def record(self, scope: Scope) -> Iterator["Record"]:
        """Follow one request; one that is neither finished nor failed at the end was left by its client."""
        record = scope["record"] = Record()
        try:
            yield record
        finally:
            scope.setdefault("log", {}).update(record.for_log())
            # Counted by the loop itself: whatever goes wrong in there, no client's stream ends with it.
            asyncio.get_running_loop().call_soon(self._count, record)

    def answered(self, status: int) -> None:
        """Count an answer of HTTP."""
        self.http_answers.labels(str(status)).inc()

    def to_text(self, stats: Stats | None, num_restarts: int) -> bytes:
        """The page, in Prometheus's text format; of an engine that is not ready only that."""
        self._engine.stats, self._engine.num_restarts = stats, num_restarts
        return generate_latest(self._registry)

    def _count(self, record: "Record") -> None:
        self.requests.labels(record.reason).inc()
        self.prompt_tokens.inc(record.prompt_tokens)
        self.generated_tokens.inc(record.generated_tokens)
        self.latency.observe(record.ended - record.began)
        if record.first is not None:
            self.ttft.observe(record.first - record.began)
            self.queue.observe(record.queue_seconds)
            if record.generated_tokens > record.num_answers:
                tokens = (record.generated_tokens - record.num_answers) / record.num_answers
                self.tpot.observe((record.ended - record.first) / tokens)


def _seconds(name: str, help_text: str, bounds: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"rapid_llm_{name}_seconds", help_text, buckets=bounds, registry=registry)


class Record:
    """One request's clock and counts. Times in seconds of the monotonic clock.

    Attributes:
        reason: "stop", "length", "error", or "abort" as long as it has not ended.
    """

    def __init__(self) -> None:
        self.began = self.ended = time.monotonic()
        self.first: float | None = None
        self.reason = "abort"
        self._outputs: dict[int, RequestOutput] = {}

    def take(self, place: int, output: RequestOutput) -> None:
        """The newest state of the output of one prompt."""
        if self.first is None and any(answer.token_ids for answer in output.outputs):
            self.first = time.monotonic()
        self._outputs[place] = output
        self.ended = time.monotonic()

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        """All answers are complete: it ended by length where any of them did."""
        reasons = {answer.finish_reason or "" for output in outputs for answer in output.outputs}
        self.reason = "length" if "length" in reasons else "stop"

    def fail(self) -> None:
        """It ended with an error."""
        self.reason, self.ended = "error", time.monotonic()

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts that were taken."""
        return sum(len(output.prompt_token_ids) for output in self._outputs.values())

    @property
    def generated_tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.token_ids) for output in self._outputs.values() for answer in output.outputs)

    @property
    def num_answers(self) -> int:
        """Answers so far."""
        return sum(len(output.outputs) for output in self._outputs.values())

    @property
    def cached_tokens(self) -> int:
        """Of all prompts, those that the prefix cache held."""
        return sum(output.num_cached_tokens for output in self._outputs.values())

    @property
    def queue_seconds(self) -> float:
        """How long the prompt that waited longest did."""
        return max((output.queue_seconds for output in self._outputs.values()), default=0.0)

    @property
    def finish_reasons(self) -> list[str]:
        """Of each answer; "abort" where it has none, since its client left before."""
        return [answer.finish_reason or "abort" for output in self._outputs.values() for answer in output.outputs]

    def for_log(self) -> dict[str, str | int]:
        """What the log says of it."""
        return {
            "prompt_tokens": self.prompt_tokens, "generated_tokens": self.generated_tokens, "finish_reason": self.reason,
        }  # fmt: skip


class EngineCollector(Collector):
    """The engine's own counts, handed over before each page; its counters begin anew with each engine."""

    def __init__(self) -> None:
        self.stats: Stats | None = None
        self.num_restarts = 0

    def collect(self) -> Iterator[Metric]:
        """The metrics of the newest stats."""
        yield GaugeMetricFamily("rapid_llm_ready", "Whether requests are served", float(self.stats is not None))
        yield CounterMetricFamily("rapid_llm_engine_restarts", "Times that the engine was started again", self.num_restarts)
        if self.stats is not None:
            yield from _gauges(self.stats)
            yield from _counters(self.stats)
            counts = zip((*map(str, STEP_BOUNDS), "+Inf"), accumulate(map(float, self.stats.step_counts)), strict=True)
            yield HistogramMetricFamily(
                "rapid_llm_step_seconds", "Steps by what they took on the host", list(counts), self.stats.total_step_seconds
            )


def _gauges(stats: Stats) -> Iterator[Metric]:
    yield GaugeMetricFamily("rapid_llm_requests_waiting", "Answers in the queue", stats.waiting)
    yield GaugeMetricFamily("rapid_llm_requests_running", "Answers that are computed", stats.running)
    yield GaugeMetricFamily("rapid_llm_kv_pages_used", "Pages of the KV pool that somebody holds", stats.used_pages)
    yield GaugeMetricFamily("rapid_llm_kv_pages", "Pages of the KV pool", stats.num_pages)
    yield GaugeMetricFamily("rapid_llm_kv_used_share", "Share of the KV pool in use", stats.used_pages / stats.num_pages)


def _counters(stats: Stats) -> Iterator[Metric]:
    yield CounterMetricFamily("rapid_llm_preemptions", "Times that an answer gave its pages up", stats.num_preemptions)
    yield CounterMetricFamily("rapid_llm_admitted_tokens", "Tokens of answers that were started", stats.admitted_tokens)
    yield CounterMetricFamily("rapid_llm_cached_tokens", "Those that the prefix cache held", stats.cached_tokens)
    yield CounterMetricFamily("rapid_llm_compiles_after_ready", "Kernels compiled or loaded after ready", stats.num_compiles)
