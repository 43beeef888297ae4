"""/v1/embeddings: texts as vectors."""

from typing import Literal

import msgspec

from rapid_llm.engine.output import RequestOutput
from rapid_llm.entrypoints.protocol.fields import RequestFields


class EmbeddingsRequest(RequestFields, kw_only=True):
    """One text or several, each as it is or as a list of token ids; the rest is as in PoolingParams.

    Base64 is of the float32 numbers, little end first.
    """

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """One vector: numbers, or base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs together."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, outputs: "list[RequestOutput]") -> "EmbeddingUsage":
        """Of one output an input."""
        count = sum(len(output.prompt_token_ids) for output in outputs)
        return cls(count, count)


class EmbeddingList(msgspec.Struct, kw_only=True):
    """One vector an input, in their order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
