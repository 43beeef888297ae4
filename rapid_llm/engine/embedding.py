"""The text half of a prompt that becomes a vector: what the model's hidden states came to, made into what was asked for."""

import numpy as np

from rapid_llm.config import PoolingParams
from rapid_llm.engine.output import RequestOutput
from rapid_llm.engine.request import TokenOutput
from rapid_llm.engine.text import FAILURES
from rapid_llm.errors import RapidError


class EmbeddingRequest:
    """Follows one sequence of the token half, which ends with its vector, and keeps the RequestOutput up to date.

    Attributes:
        id: the request's.
    """

    def __init__(self, output: RequestOutput, params: PoolingParams) -> None:
        self.output, self.id = output, output.request_id
        self._params = params

    @property
    def finished(self) -> bool:
        """Whether the vector is there, or will never be."""
        return self.output.finished

    def take(self, update: TokenOutput) -> bool:
        """Add what a step brought; nothing has to be told to the token half."""
        self.output.num_cached_tokens = update.num_cached_tokens
        if update.vector:
            self.output.embedding = embedding(update.vector, self._params)
        elif update.finish_reason == "error":
            self.output.error = FAILURES[update.failure]
        self.output.finished = update.finish_reason is not None
        return False

    def catch_up(self) -> None:
        """A vector comes whole."""

    def fail(self, error: RapidError) -> None:
        """End with an error that is not of a step."""
        self.output.error, self.output.finished = str(error), True

    def abort(self) -> None:
        """Nothing more will come."""
        self.output.finished = True


def embedding(vector: bytes, params: PoolingParams) -> list[float]:
    """The first ``dimensions`` of a vector [hidden_size] of float32, of length 1 where that is asked for; float32 values."""
    values = np.frombuffer(vector, "<f4").astype(np.float64)[: params.dimensions]
    if params.normalize:
        values /= max(float(np.linalg.norm(values)), 1e-12)
    floats: list[float] = values.astype(np.float32).tolist()
    return floats
