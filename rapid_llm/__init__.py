"""rapid_llm: an LLM inference engine whose kernels are native Triton. Public names, resolved on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rapid_llm.version import __version__

if TYPE_CHECKING:
    from rapid_llm.config import EngineConfig, Grammar, PoolingParams, SamplingParams
    from rapid_llm.engine.output import CompletionOutput, Logprob, RequestOutput
    from rapid_llm.entrypoints.async_llm import AsyncLLM
    from rapid_llm.entrypoints.llm import LLM
    from rapid_llm.errors import (
        CheckpointError,
        ConfigError,
        EngineDiedError,
        KernelInputError,
        NoKernelError,
        ProtocolError,
        RapidError,
        RequestError,
    )

_EXPORTS = {
    "LLM": "rapid_llm.entrypoints.llm",
    "AsyncLLM": "rapid_llm.entrypoints.async_llm",
    "EngineConfig": "rapid_llm.config",
    "SamplingParams": "rapid_llm.config",
    "Grammar": "rapid_llm.config",
    "PoolingParams": "rapid_llm.config",
    "CompletionOutput": "rapid_llm.engine.output",
    "Logprob": "rapid_llm.engine.output",
    "RequestOutput": "rapid_llm.engine.output",
    "RapidError": "rapid_llm.errors",
    "ConfigError": "rapid_llm.errors",
    "CheckpointError": "rapid_llm.errors",
    "RequestError": "rapid_llm.errors",
    "NoKernelError": "rapid_llm.errors",
    "KernelInputError": "rapid_llm.errors",
    "EngineDiedError": "rapid_llm.errors",
    "ProtocolError": "rapid_llm.errors",
}

__all__ = [  # noqa: RUF022  (in the order a reader meets them)
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "Grammar",
    "PoolingParams",
    "EngineConfig",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "RapidError",
    "ConfigError",
    "CheckpointError",
    "RequestError",
    "NoKernelError",
    "KernelInputError",
    "EngineDiedError",
    "ProtocolError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
