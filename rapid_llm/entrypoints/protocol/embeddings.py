"""/v1/embeddings: texts as vectors, where a model gives them."""

from typing import Literal

import msgspec

from rapid_llm.entrypoints.protocol.fields import RequestFields


class EmbeddingsRequest(RequestFields, kw_only=True):
    """One text or several, or token ids."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float]


class EmbeddingList(msgspec.Struct, kw_only=True):
    """One vector an input."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
