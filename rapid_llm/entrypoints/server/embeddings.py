"""POST /v1/embeddings."""

from starlette.requests import Request
from starlette.responses import Response

from rapid_llm.entrypoints.protocol.embeddings import EmbeddingsRequest
from rapid_llm.entrypoints.server.bodies import read_for_model
from rapid_llm.errors import RequestError


async def embeddings(request: Request) -> Response:
    """Say that no model here gives vectors: the architectures that are served are trained to continue text."""
    serving, _, _ = await read_for_model(request, EmbeddingsRequest)
    problem, wanted = "embeddings are not supported by this model", "a model that is trained to give them"
    change = "use a server of embeddings for them"
    raise RequestError(problem, param="model", code="unsupported_by_model", got=serving.model, wanted=wanted, change=change)
