"""Token embedding, and the head that turns hidden rows into logits, which may share the embedding's matrix."""

from collections.abc import Iterator

import torch

from rapid_llm.modules.placement import Placement
from rapid_llm.weights import WeightSlot


class Embedding:
    """Rows of a [vocab_size, hidden_size] matrix by token id."""

    def __init__(self, place: Placement, name: str, vocab_size: int, hidden_size: int) -> None:
        self.name = name
        # Transposed on a CPU for the head that shares it; picking a few columns costs nothing next to a step.
        self.weight = place.weight(vocab_size, hidden_size, transposed=True)
        self._rows = place.kernel("vocab_embedding", vocab_size=vocab_size, hidden_size=hidden_size)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int32 -> [T, hidden_size]."""
        out = self.weight.new_empty(token_ids.shape[0], self.weight.shape[1])
        self._rows(token_ids, self.weight, out=out)
        return out

    def weights(self) -> Iterator[WeightSlot]:
        """The matrix."""
        yield WeightSlot(f"{self.name}.weight", self.weight)


class Head:
    """Logits of chosen rows. ``tied`` shares the embedding's matrix, which then also loads it."""

    def __init__(self, place: Placement, name: str, embedding: Embedding, *, tied: bool) -> None:
        vocab_size, hidden_size = embedding.weight.shape
        self.name, self.tied = name, tied
        self.weight = embedding.weight if tied else place.weight(vocab_size, hidden_size, transposed=True)
        self._gemm = place.kernel("dense_gemm", n=vocab_size, k=hidden_size)
        self._rows = place.kernel("vocab_embedding", hidden_size=hidden_size)

    def __call__(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Hidden [T, hidden_size] and the int32 rows [S] to look at -> logits [S, vocab_size]."""
        chosen = hidden.new_empty(rows.shape[0], hidden.shape[1])
        self._rows(rows, hidden, out=chosen)
        logits = hidden.new_empty(rows.shape[0], self.weight.shape[0])
        self._gemm(chosen, self.weight, out=logits)
        return logits

    def share(self, embedding: Embedding) -> None:
        """Drop the own matrix, found equal to the embedding's after loading."""
        self.weight, self.tied = embedding.weight, True

    def weights(self) -> Iterator[WeightSlot]:
        """The own matrix, if any."""
        if not self.tied:
            yield WeightSlot(f"{self.name}.weight", self.weight)
