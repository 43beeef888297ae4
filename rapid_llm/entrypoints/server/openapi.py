"""GET /openapi.json: the API as the types of protocol/ say it."""

from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rapid_llm.entrypoints.protocol import chat, completions, embeddings, engine_view, errors, models, responses, tokens
from rapid_llm.entrypoints.protocol.decoding import schemas
from rapid_llm.version import __version__

Kind = type[msgspec.Struct]
OPERATIONS: tuple[tuple[str, str, str, Kind | None, Kind | None], ...] = (
    ("get", "/health", "Whether the server lives", None, models.Health),
    ("get", "/ready", "Whether requests are served", None, models.Readiness),
    ("get", "/metrics", "Counts in Prometheus's text format", None, None),
    ("get", "/engine", "The engine now, its start and its kernels, explained", None, engine_view.EngineView),
    ("get", "/v1/models", "The models that are served", None, models.ModelList),
    ("get", "/v1/models/{name}", "One of them", None, models.ModelCard),
    ("post", "/v1/chat/completions", "Answer a conversation", chat.ChatRequest, chat.ChatCompletion),
    ("post", "/v1/completions", "Continue a text", completions.CompletionRequest, completions.Completion),
    ("post", "/v1/responses", "Answer a conversation", responses.ResponsesRequest, responses.Response),
    ("post", "/v1/embeddings", "Texts as vectors", embeddings.EmbeddingsRequest, embeddings.EmbeddingList),
    ("post", "/tokenize", "Token ids of a text or a conversation", tokens.TokenizeRequest, tokens.TokenizeResponse),
    ("post", "/detokenize", "Text of token ids", tokens.DetokenizeRequest, tokens.DetokenizeResponse),
)
"""Method, path, summary, and the types of request and answer; an answer without a type is text."""
STREAMS: dict[Kind, Kind] = {
    chat.ChatRequest: chat.ChatCompletionChunk,
    completions.CompletionRequest: completions.Completion,
    responses.ResponsesRequest: responses.ResponseEvent,
}
"""The type of a stream's events, by that of its request."""
_REFUSALS = {
    "400": "The request is wrong", "401": "The API key is not known", "404": "Unknown model or path", "408": "Sent too slowly",
    "413": "The body is too long", "415": "The body is no JSON by its type", "429": "Too many requests are open",
    "500": "The model's output was damaged", "503": "The engine is not ready, or has ended",
}  # fmt: skip


async def openapi(_: Request) -> Response:
    """The document."""
    return Response(msgspec.json.encode(document()), media_type="application/json")


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document, version 3.1."""
    kinds = {kind for _, _, _, *pair in OPERATIONS for kind in pair if kind is not None}
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, ask, answer in OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, summary, ask, answer)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rapid_llm", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas([*kinds, *STREAMS.values(), errors.ErrorBody]),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(path: str, summary: str, ask: Kind | None, answer: Kind | None) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}} if answer is None else {"application/json": _reference(answer)}
    if ask in STREAMS:
        content["text/event-stream"] = {"schema": _event(STREAMS[ask])}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "The answer", "content": content}, **_refusals(path, answer)},
    }
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if ask is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _reference(ask)}}
    return operation


def _event(kind: Kind) -> dict[str, Any]:
    """One event of a stream, which ends with one whose data is "[DONE]" where its events have no names."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _reference(kind)["schema"]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _refusals(path: str, answer: Kind | None) -> dict[str, Any]:
    own = answer if path in ("/health", "/ready") and answer is not None else errors.ErrorBody
    return {
        status: {"description": words, "content": {"application/json": _reference(own if status == "503" else errors.ErrorBody)}}
        for status, words in _REFUSALS.items()
    }


def _reference(kind: Kind) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
