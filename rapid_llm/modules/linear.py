"""Linear layers: one weight that several checkpoint tensors may be stacked in."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from rapid_llm.modules.placement import Placement
from rapid_llm.modules.weights import Target, WeightSlot
from rapid_llm.quantization.online import quantised_matrix


class Matrix(Protocol):
    """[out_features, in_features], as numbers or in fewer bits."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ matrix.T (+ bias) into ``out``."""

    def rows(self, start: int, stop: int) -> Target:
        """Where a loader puts these rows."""


class DenseMatrix:
    """The numbers themselves, in the compute dtype."""

    def __init__(self, place: Placement, out_features: int, in_features: int) -> None:
        self.weight = place.weight(out_features, in_features, transposed=True)
        self._gemm = place.kernel("dense_gemm", n=out_features, k=in_features)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ matrix.T (+ bias) into ``out``."""
        self._gemm(x, self.weight, out=out, bias=bias)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Where a loader puts these rows."""
        return self.weight[start:stop]


class Linear:
    """y = x @ weight.T + bias.

    Args:
        parts: (name, out_features) of the checkpoint tensors stacked along the output, in order; names without ".weight".
        in_features: columns of each.
        bias: whether each part has a ".bias".
    """

    def __init__(self, place: Placement, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool = False) -> None:
        self.parts = tuple(parts)
        self.out_features = sum(size for _, size in self.parts)
        self.bias = place.weight(self.out_features) if bias else None
        self.matrix: Matrix
        if place.quantize is None:
            self.matrix = DenseMatrix(place, self.out_features, in_features)
        else:
            self.matrix = quantised_matrix(place.quantize, place, self.parts[0][0], self.out_features, in_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, out_features], in the dtype of ``x``."""
        out = x.new_empty(x.shape[0], self.out_features)
        self.matrix(x, out, self.bias)
        return out

    def weights(self) -> Iterator[WeightSlot]:
        """The stacked parts."""
        start = 0
        for name, size in self.parts:
            yield WeightSlot(f"{name}.weight", self.matrix.rows(start, start + size))
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", self.bias[start : start + size])
            start += size
