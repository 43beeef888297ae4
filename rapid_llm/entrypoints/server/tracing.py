"""OpenTelemetry traces: a span a request, sent to a collector. Nothing of OpenTelemetry is imported where none is asked for.

Attributes are those of its semantic conventions for HTTP and generative AI; ``gen_ai.latency.*`` are named as vLLM names them.
"""

import asyncio
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from rapid_llm.errors import ConfigError
from rapid_llm.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACES_PATH = "/v1/traces"
_FLUSH_MS = 3000
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}
_ASKED = {
    "model": "model", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed", "n": "choice.count",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty", "stream": "stream",
    "max_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens",
}  # fmt: skip
"""Fields of a request, and how gen_ai.request.* calls them."""


def check_tracing(endpoint: str | None) -> None:
    """Refuse to start where traces are asked for and OpenTelemetry is not installed.

    Raises: ConfigError.
    """
    if _is_asked_for(endpoint) and not _is_installed():
        got = endpoint or next(f"{name}={os.environ[name]}" for name in _ENDPOINTS if os.environ.get(name))
        wanted = "the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
        change = "pip install 'rapid-llm[otel]', or leave the endpoint out (OTEL_SDK_DISABLED=true turns variables off)"
        raise ConfigError("traces cannot be sent without OpenTelemetry", got=got, wanted=wanted, change=change)


def start_tracing(endpoint: str | None) -> "Tracing | None":
    """What follows requests; None where no traces are asked for.

    Args:
        endpoint: the collector's URL; None follows the variables OTEL_EXPORTER_OTLP_*.
    """
    if not _is_asked_for(endpoint):
        return None
    check_tracing(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = endpoint.rstrip("/") if endpoint is not None else None
    if url is not None and not url.endswith(_TRACES_PATH):
        url += _TRACES_PATH
    return Tracing(OTLPSpanExporter(endpoint=url))


class Tracing:
    """Makes the spans of one server and hands them to an exporter, in batches and from another thread.

    Args:
        exporter: sends them.
    """

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        name = {} if is_named else {"service.name": "rapid-llm"}
        self._provider = TracerProvider(resource=Resource.create({**name, "service.version": __version__}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rapid_llm", __version__)

    def begin(self, scope: Scope, headers: Headers) -> "Trace":
        """A span for a request: a part of the trace that its header traceparent names, or a trace of its own."""
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, format_trace_id

        attributes = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "url.scheme": scope.get("scheme", "http"),
        }
        name = f"{scope['method']} {scope['path']}" if scope["path"] in _OPERATIONS else scope["method"]
        context = propagate.extract(dict(headers))
        span = self._tracer.start_span(name, context, SpanKind.SERVER, attributes)
        scope["log"]["trace_id"] = format_trace_id(span.get_span_context().trace_id)
        return Trace(span, scope)

    async def close(self) -> None:
        """Send what has not been sent, as far as the collector takes it in a few seconds."""
        await asyncio.to_thread(self._provider.force_flush, _FLUSH_MS)
        await asyncio.to_thread(self._provider.shutdown)


class Trace:
    """The span of one request."""

    def __init__(self, span: "Span", scope: Scope) -> None:
        self._span, self._scope = span, scope

    def end(self, status: int) -> None:
        """The request has ended; a status of 0 is that of a client which left before there was one."""
        from opentelemetry.trace import StatusCode

        log = self._scope["log"]
        self._span.set_attribute("rapid_llm.request_id", log["request_id"])
        if status:
            self._span.set_attribute("http.response.status_code", status)
        for name, value in {**self._asked(), **self._answered()}.items():
            self._span.set_attribute(name, value)
        if status >= 500 or log.get("finish_reason") == "error":
            self._span.set_attribute("error.type", str(status) if status >= 500 else "stream_failed")
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _asked(self) -> dict[str, Any]:
        asked, operation = self._scope.get("asked"), _OPERATIONS.get(self._scope["path"])
        if asked is None or operation is None:
            return {}
        values = {attribute: getattr(asked, name, None) for name, attribute in _ASKED.items() if _is_said(asked, name)}
        said = {f"gen_ai.request.{attribute}": value for attribute, value in values.items()}
        return {"gen_ai.operation.name": operation, "gen_ai.provider.name": "rapid_llm", **said}

    def _answered(self) -> dict[str, Any]:
        record = self._scope.get("record")
        if record is None:
            return {}
        found = {
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        }
        if "id" in self._scope["log"]:
            found["gen_ai.response.id"] = self._scope["log"]["id"]
        if record.first is not None:
            found["gen_ai.latency.time_in_queue"] = record.queue_seconds
            found["gen_ai.latency.time_to_first_token"] = record.first - record.began
        return found


def _is_said(asked: Any, name: str) -> bool:
    """Whether a request names a field, with a value of a kind that attributes have."""
    return isinstance(getattr(asked, name, None), str | bool | int | float)


def _is_asked_for(endpoint: str | None) -> bool:
    if endpoint is not None:
        return True
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER", "") == "none":
        return False
    return any(os.environ.get(name) for name in _ENDPOINTS)


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_EXPORTER) is not None and importlib.util.find_spec("opentelemetry.sdk") is not None
    except (ModuleNotFoundError, ValueError):
        return False
