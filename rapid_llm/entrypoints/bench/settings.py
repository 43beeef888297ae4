"""What a load is: the flags of ``rapid-llm bench serve`` as one frozen value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rapid_llm.errors import ConfigError

Endpoint = Literal["chat", "completions"]
ENDPOINTS: Mapping[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions"}
LIMITS = ("ttft", "tpot", "latency")
"""What an answer's goodput may be bounded by."""
CLOSED_LOOP = 32
"""Requests that are open at once where neither a rate nor a number is given."""


@dataclass(frozen=True)
class Load:
    """Which requests are sent to whom, and when.

    Attributes:
        url: of the API, such as http://127.0.0.1:8000/v1.
        model: what requests call it; None asks /models for the first.
        endpoint: "chat" or "completions".
        prompts: "words", "ids", or the path of a JSONL file.
        ids_below: random ids are below this.
        requests: how many are sent.
        concurrency: how many may be open at once; None bounds nothing where a rate is given, else it is CLOSED_LOOP.
        rate: requests a second, at Poisson times; inf sends each as soon as it may be open.
        input_len: words or ids of a prompt.
        output_len: max_tokens.
        warmup: requests that are sent first and not counted.
        temperature: sent as it is; None sends none.
        ignore_eos: asks the server to go on past the end of text. Not OpenAI's: not every server takes it.
        body: fields that are put over those of each request.
        seed: of prompts and times.
        timeout: seconds that one answer may take.
        max_seconds: after which nothing more is sent, and what is open is cut off.
        goodput: milliseconds, by LIMITS, within which an answer counts as good.
    """

    url: str
    model: str | None = None
    endpoint: Endpoint = "chat"
    prompts: str = "words"
    ids_below: int = 10_000
    requests: int = 100
    concurrency: int | None = None
    rate: float = math.inf
    input_len: int = 256
    output_len: int = 128
    warmup: int = 1
    temperature: float | None = 0.0
    ignore_eos: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    timeout: float = 600.0
    max_seconds: float = math.inf
    goodput: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ids_below", "requests", "input_len", "output_len"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _check("concurrency", self.concurrency, self.concurrency is None or self.concurrency >= 1, "at least 1")
        _check("warmup", self.warmup, self.warmup >= 0, "at least 0")
        for name in ("rate", "timeout", "max_seconds"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "more than 0")
        for name, limit in self.goodput.items():
            _check("goodput", name, name in LIMITS, f"one of {', '.join(LIMITS)}")
            _check("goodput", limit, limit > 0, "milliseconds, more than 0")
        if self.prompts == "ids" and self.endpoint == "chat":
            change = "add --endpoint completions"
            raise ConfigError("ids are no chat", got="prompts 'ids' for the endpoint 'chat'", wanted="completions", change=change)

    @property
    def most_open(self) -> int:
        """Requests that may be open at once."""
        if self.concurrency is not None:
            return self.concurrency
        return self.requests if math.isfinite(self.rate) else min(self.requests, CLOSED_LOOP)

    @property
    def path(self) -> str:
        """Of the endpoint, behind the URL."""
        return ENDPOINTS[self.endpoint]


def _check(name: str, value: Any, is_good: bool, wanted: str) -> None:
    if not is_good:
        raise ConfigError(f"{name} is out of range", got=repr(value), wanted=wanted, change=f"pass another {name}")
