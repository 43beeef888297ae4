"""GET /health, /ready, /metrics and /v1/models."""

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from rapid_llm.entrypoints.protocol.models import Health, ModelCard, ModelList
from rapid_llm.entrypoints.server.serving import Serving


async def health(request: Request) -> Response:
    """Whether this process and its engine's steps go on."""
    stuck = _serving(request).stuck_seconds()
    if stuck:
        return _json(Health(f"a step has not ended for {stuck:.0f} seconds"), 503)
    return _json(Health("live"))


async def ready(request: Request) -> Response:
    """Whether requests are served; while the engine loads, how far it is."""
    now = _serving(request).readiness()
    return _json(now) if now.status == "ready" else _json(now, 503, {"Retry-After": "1"})


async def metrics(request: Request) -> Response:
    """Counts in Prometheus's text format."""
    serving = _serving(request)
    text = serving.metrics.to_text(await serving.stats(), serving.num_restarts)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def models(request: Request) -> Response:
    """The one model that is served."""
    return _json(ModelList(data=[await _card(_serving(request))]))


async def model(request: Request) -> Response:
    """One model by its name."""
    serving, name = _serving(request), request.path_params["name"]
    serving.llm(name)
    return _json(await _card(serving))


async def _card(serving: Serving) -> ModelCard:
    limits = await serving.llm().ready()
    return ModelCard(id=serving.model, created=serving.created, max_model_len=limits.max_model_len)


def _serving(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


def _json(body: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
