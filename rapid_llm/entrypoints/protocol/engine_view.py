"""/engine: the engine as a page shows it, its start and its kernels included."""

import msgspec

from rapid_llm.entrypoints.protocol.models import Readiness
from rapid_llm.kernels.dispatcher.served_kernel import ServedKernel
from rapid_llm.ledger import Phase


class EngineLimits(msgspec.Struct, kw_only=True):
    """Tokens that prompt and answer may have together, answers that run at once, tokens that the KV pool holds."""

    max_model_len: int
    max_num_seqs: int
    kv_tokens: int


class EngineLoad(msgspec.Struct, kw_only=True):
    """The engine between two steps: what is there now, and counts since its start, whose differences are rates.

    ``step_seconds`` is what the newest step took, ``total_step_seconds`` what all took, both on the host. ``admitted_tokens``
    are those of requests that were started, ``cached_tokens`` how many of them the prefix cache held.
    """

    running: int
    waiting: int
    kv_pages_used: int
    kv_pages: int
    steps: int
    step_seconds: float
    total_step_seconds: float
    generated_tokens: int
    admitted_tokens: int
    cached_tokens: int
    preemptions: int
    compiles_after_ready: int


class EngineStartup(msgspec.Struct, kw_only=True):
    """The newest start: phases in seconds since the process began, lines on what was loaded, and the first token.

    ``accounted`` is the share of the time to the first token that phases cover.
    """

    phases: list[Phase]
    notes: list[str]
    first_token: float | None
    accounted: float


class EngineView(msgspec.Struct, kw_only=True):
    """All of it. ``seconds`` is a clock, for rates between two views; ``limits`` and ``load`` are null while nothing is served.

    ``kernels`` are empty until the first engine is ready.
    """

    model: str
    version: str
    seconds: float
    readiness: Readiness
    restarts: int
    limits: EngineLimits | None = None
    load: EngineLoad | None = None
    startup: EngineStartup | None = None
    kernels: list[ServedKernel] = []
