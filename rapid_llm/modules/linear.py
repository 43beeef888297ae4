"""Linear layers: one weight that several checkpoint tensors may be stacked in."""

from collections.abc import Iterator, Sequence

import torch

from rapid_llm.modules.placement import Placement
from rapid_llm.modules.weights import WeightSlot


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
        self.weight = place.weight(self.out_features, in_features, transposed=True)
        self.bias = place.weight(self.out_features) if bias else None
        self._gemm = place.kernel("dense_gemm", n=self.out_features, k=in_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, out_features], in the dtype of ``x``."""
        out = x.new_empty(x.shape[0], self.out_features)
        self._gemm(x, self.weight, out=out, bias=self.bias)
        return out

    def weights(self) -> Iterator[WeightSlot]:
        """The stacked parts."""
        start = 0
        for name, size in self.parts:
            yield WeightSlot(f"{name}.weight", self.weight[start : start + size])
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", self.bias[start : start + size])
            start += size
