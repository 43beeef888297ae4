"""The ASGI app: which path is answered by what."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from rapid_llm.config import EngineConfig
from rapid_llm.entrypoints.server import chat, completions, embeddings, engine_view, openapi, page, probes, responses, tokens
from rapid_llm.entrypoints.server.edge import Edge
from rapid_llm.entrypoints.server.refusals import on_bug, on_http_error, on_rapid_error
from rapid_llm.entrypoints.server.serving import Serving
from rapid_llm.entrypoints.server.settings import ServerConfig
from rapid_llm.entrypoints.server.tracing import start_tracing
from rapid_llm.errors import RapidError

ROUTES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("GET", "/health", probes.health),
    ("GET", "/ready", probes.ready),
    ("GET", "/metrics", probes.metrics),
    ("GET", "/engine", engine_view.engine_view),
    ("GET", "/openapi.json", openapi.openapi),
    ("GET", "/v1/models", probes.models),
    ("GET", "/v1/models/{name:path}", probes.model),
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/responses", responses.responses),
    ("POST", "/v1/embeddings", embeddings.embeddings),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
)
"""What the OpenAPI page describes, and itself."""
PAGE_PATHS = ("/", "/page/{name}")


def build_app(engine: EngineConfig, config: ServerConfig, on_end: Callable[[RapidError], None]) -> ASGIApp:
    """The app; its lifespan is the engine's, whose start it does not wait for.

    Args:
        engine, config: the settings.
        on_end: called when no engine will be started any more, with why.
    """
    serving, tracing = Serving(engine, config, on_end), start_tracing(config.otlp_endpoint)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        serving.start()
        try:
            yield
        finally:
            await serving.close()
            if tracing is not None:
                await tracing.close()

    app = Starlette(
        routes=[
            *(Route(path, endpoint, methods=[method]) for method, path, endpoint in ROUTES),
            *(Route(path, page.page, methods=["GET"]) for path in PAGE_PATHS),
        ],
        middleware=_cors(config),
        exception_handlers={RapidError: on_rapid_error, HTTPException: on_http_error, Exception: on_bug},
        lifespan=lifespan,
    )
    app.state.serving = serving
    return Edge(app, serving.metrics.answered, config.api_keys, log_requests=config.log_requests, tracing=tracing)


def _cors(config: ServerConfig) -> list[Middleware]:
    if not config.origins:
        return []
    headers = ["authorization", "content-type", "x-request-id"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.origins,
            allow_methods=["GET", "POST"],
            allow_headers=headers,
            expose_headers=["x-request-id"],
        )
    ]
