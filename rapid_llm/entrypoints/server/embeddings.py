"""POST /v1/embeddings."""

import base64
from array import array
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request

from rapid_llm.config import PoolingParams
from rapid_llm.engine.output import RequestOutput
from rapid_llm.entrypoints.protocol.embeddings import Embedding, EmbeddingList, EmbeddingsRequest, EmbeddingUsage
from rapid_llm.entrypoints.server.bodies import read_for_model
from rapid_llm.entrypoints.server.exchange import Exchange
from rapid_llm.entrypoints.server.naming import Naming
from rapid_llm.entrypoints.server.prompts import prompts_of
from rapid_llm.errors import RequestError

if TYPE_CHECKING:
    from rapid_llm.engine.frontend import Prompt
    from rapid_llm.entrypoints.async_llm import AsyncLLM

MAX_INPUTS = 2048


async def embeddings(request: Request) -> Exchange:
    """Turn texts into vectors."""
    serving, ask, llm = await read_for_model(request, EmbeddingsRequest)
    inputs = prompts_of("input", ask.input)
    if len(inputs) > MAX_INPUTS:
        got, wanted = f"{len(inputs)} inputs", f"at most {MAX_INPUTS}"
        raise RequestError("input is out of range", param="input", got=got, wanted=wanted, change="send several requests")
    params = PoolingParams(ask.pooling or "last", ask.normalize is not False, ask.dimensions)
    naming = Naming.of(request, serving, "embd", ask.ignored)
    writer = EmbeddingWriter(naming.fields["model"], in_base64=ask.encoding_format == "base64")
    streams = [_vector(llm, one, params) for one in inputs]
    return Exchange(serving, streams, len(inputs), writer, is_stream=False, renamed={"": "input", "prompt": "input"})


async def _vector(llm: "AsyncLLM", prompt: "Prompt", params: PoolingParams) -> AsyncGenerator[RequestOutput]:
    yield await llm.embed(prompt, params)


class EmbeddingWriter:
    """Answers as a list of vectors, always at once."""

    def __init__(self, model: str, *, in_base64: bool) -> None:
        self._model, self._in_base64 = model, in_base64

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The body."""
        data = [Embedding(index=place, embedding=self._written(output.embedding or [])) for place, output in enumerate(outputs)]
        return msgspec.json.encode(EmbeddingList(data=data, model=self._model, usage=EmbeddingUsage.of(list(outputs))))

    def _written(self, vector: list[float]) -> list[float] | str:
        return base64.b64encode(array("f", vector).tobytes()).decode() if self._in_base64 else vector
