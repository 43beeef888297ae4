"""What a server may be told besides its engine's settings: flags of ``serve`` and the table [server] of a config file."""

from dataclasses import dataclass
from typing import Any

from rapid_llm.entrypoints.tools.formats import TOOL_FORMATS
from rapid_llm.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True)
class ServerConfig:
    """The server's side of ``rapid-llm serve``.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        api_key: a key or several, one of which each request must bring as "Authorization: Bearer KEY"; none asks for none.
        served_model_name: what the model is called in requests; None is its path or name, without the folders before it.
        cors_origins: origins of web pages that may call it, "*" for all; none allows none.
        max_requests: requests that are open at once, running and queued; the next one is answered 429. One that asks for several
            answers counts once for each.
        max_body_bytes: longest body of a request.
        drain_seconds: how long SIGTERM waits for open answers.
        max_restarts: times that an engine which has died is started again within ten minutes, before the server gives up.
        tool_format: in which format the model calls tools: one of TOOL_FORMATS; None tells it from the chat template.
        log_requests: a line on standard error for each request.
        otlp_endpoint: who takes OpenTelemetry's traces, by OTLP over HTTP; None follows OTEL_EXPORTER_OTLP_ENDPOINT and its like,
            and sends none where they name nobody.
        progress: shows how far a start is, on standard error: a bar on a terminal, else a log line every few seconds.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | tuple[str, ...] | list[str] = ()
    served_model_name: str | None = None
    cors_origins: str | tuple[str, ...] | list[str] = ()
    max_requests: int = 2048
    max_body_bytes: int = 16 * MIB
    drain_seconds: float = 60.0
    max_restarts: int = 5
    tool_format: str | None = None
    log_requests: bool = True
    otlp_endpoint: str | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        name = self.served_model_name
        url = self.otlp_endpoint
        is_url = isinstance(url, str) and url.startswith(("http://", "https://"))
        _check("otlp_endpoint", url, url is None or is_url, "a URL such as http://127.0.0.1:4318")
        _check("host", self.host, isinstance(self.host, str) and bool(self.host), "a string")
        _check("served_model_name", name, name is None or (isinstance(name, str) and bool(name)), "a string")
        _check("port", self.port, _is_int(self.port) and 0 <= self.port <= 65535, "0 to 65535")
        for name in ("max_requests", "max_body_bytes"):
            _check(name, getattr(self, name), _is_int(getattr(self, name)) and getattr(self, name) >= 1, "an integer >= 1")
        _check("max_restarts", self.max_restarts, _is_int(self.max_restarts) and self.max_restarts >= 0, "an integer >= 0")
        format = self.tool_format
        _check("tool_format", format, format is None or format in TOOL_FORMATS, " | ".join(TOOL_FORMATS))
        seconds = self.drain_seconds
        is_time = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < 1e9
        _check("drain_seconds", seconds, is_time, "seconds >= 0")
        for name in ("log_requests", "progress"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        for name in ("api_key", "cors_origins"):
            values = _texts(getattr(self, name))
            _check(name, "***" if name == "api_key" else getattr(self, name), values is not None, "a string or a list of them")
            object.__setattr__(self, name, values)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """``api_key`` as a tuple."""
        return tuple(self.api_key)

    @property
    def origins(self) -> tuple[str, ...]:
        """``cors_origins`` as a tuple."""
        return tuple(self.cors_origins)


def _check(name: str, value: Any, is_good: bool, wanted: str) -> None:
    if not is_good:
        raise ConfigError(f"{name} is out of range", got=repr(value), wanted=wanted, change=f"pass another {name}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _texts(value: Any) -> tuple[str, ...] | None:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, tuple | list) or not all(isinstance(text, str) and text for text in values):
        return None
    return tuple(values)
