"""/v1/models: what is served. And the answers of the probes."""

from typing import Literal

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """One model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rapid_llm"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(msgspec.Struct):
    """Status is "live", or says why not."""

    status: str


class Readiness(msgspec.Struct, kw_only=True):
    """Whether requests are served, and how far the start is.

    ``status`` is "ready", "starting", "restarting", "failed" or "closed"; ``phase`` is what the start is at, with ``done`` of
    ``total`` bytes (of the phase "kernels": kernels) where they say something.
    """

    status: str
    phase: str = ""
    done: int = 0
    total: int = 0
