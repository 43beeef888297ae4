"""GET /engine: what the page at / shows of the engine."""

import time
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rapid_llm.entrypoints.protocol.engine_view import EngineLimits, EngineLoad, EngineStartup, EngineView
from rapid_llm.entrypoints.server.serving import Serving
from rapid_llm.version import __version__

if TYPE_CHECKING:
    from rapid_llm.config import ResolvedConfig
    from rapid_llm.engine.messages import Stats
    from rapid_llm.ledger import StartupLedger


async def engine_view(request: Request) -> Response:
    """The engine now, served or not: while it loads, how far it is."""
    serving: Serving = request.app.state.serving
    view = await _view(serving)
    return Response(msgspec.json.encode(view), headers={"Cache-Control": "no-store"}, media_type="application/json")


async def _view(serving: Serving) -> EngineView:
    stats, llm = await serving.stats(), serving.newest_llm
    view = EngineView(
        model=serving.model,
        version=__version__,
        seconds=time.monotonic(),
        readiness=serving.readiness(),
        restarts=serving.num_restarts,
    )
    if llm is not None:
        view.startup, view.kernels = _startup(llm.ledger), llm.kernels
        if stats is not None:
            view.load, view.limits = _load(stats), _limits(await llm.ready())
    return view


def _limits(resolved: "ResolvedConfig") -> EngineLimits:
    kv_tokens = resolved.max_kv_tokens
    return EngineLimits(max_model_len=resolved.max_model_len, max_num_seqs=resolved.max_num_seqs, kv_tokens=kv_tokens)


def _load(stats: "Stats") -> EngineLoad:
    return EngineLoad(
        running=stats.running,
        waiting=stats.waiting,
        kv_pages_used=stats.used_pages,
        kv_pages=stats.num_pages,
        steps=stats.num_steps,
        step_seconds=stats.step_seconds,
        total_step_seconds=stats.total_step_seconds,
        generated_tokens=stats.generated_tokens,
        admitted_tokens=stats.admitted_tokens,
        cached_tokens=stats.cached_tokens,
        preemptions=stats.num_preemptions,
        compiles_after_ready=stats.num_compiles,
    )


def _startup(ledger: "StartupLedger") -> EngineStartup:
    phases = sorted(ledger.phases, key=lambda phase: phase.start)
    accounted = ledger.accounted()
    return EngineStartup(phases=phases, notes=ledger.notes, first_token=ledger.first_token, accounted=accounted)
