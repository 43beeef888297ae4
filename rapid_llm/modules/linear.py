"""Linear layers: one weight that several checkpoint tensors may be stacked in."""

from collections.abc import Iterator, Sequence

import torch

from rapid_llm.modules.placement import Placement
from rapid_llm.quantization.packed import Packed
from rapid_llm.quantization.w8a8 import Activations, Fp8Weight, RoundedRows
from rapid_llm.weights import WeightSlot


class Linear:
    """y = x @ weight.T + bias.

    Args:
        parts: (name, out_features) of the checkpoint layers stacked along the output, in order.
        in_features: columns of each.
        bias: whether each part has a ".bias".

    Attributes:
        weight: [out_features, in_features] in the compute dtype, or as the format of these layers keeps it.
    """

    def __init__(self, place: Placement, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool = False) -> None:
        self.parts = tuple(parts)
        self.out_features = sum(size for _, size in self.parts)
        self.bias = place.weight(self.out_features) if bias else None
        self.format = place.formats.of([name for name, _ in self.parts], in_features)
        self.weight: torch.Tensor | Packed
        if self.format is None:
            self.weight = place.weight(self.out_features, in_features, transposed=True)
            self._gemm = place.kernel("dense_gemm", n=self.out_features, k=in_features)
        else:
            self.weight = self.format.empty(place, self.out_features, in_features)
            self._product = self.weight.product(place)
        self._dtype = place.dtype

    def __call__(self, x: Activations) -> torch.Tensor:
        """[T, in_features] -> [T, out_features], in the compute dtype."""
        rows = x.codes if isinstance(x, RoundedRows) else x
        out = rows.new_empty(len(rows), self.out_features, dtype=self._dtype)
        if isinstance(self.weight, Packed):
            self._product(x, out, self.bias)
        else:
            self._gemm(rows, self.weight, out=out, bias=self.bias)
        return out

    @property
    def takes_fp8(self) -> Fp8Weight | None:
        """The weight, if it multiplies e4m3 activations whose scales are measured: what comes before may round them."""
        return self.weight if isinstance(self.weight, Fp8Weight) and self.weight.x_scale is None else None

    def weights(self) -> Iterator[WeightSlot]:
        """The stacked parts."""
        start = 0
        for name, size in self.parts:
            stop = start + size
            if isinstance(self.weight, Packed) and self.format is not None:
                yield from self.format.slots(name, self.weight.part(start, stop))
            elif isinstance(self.weight, torch.Tensor):
                yield WeightSlot(f"{name}.weight", self.weight[start:stop])
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", self.bias[start:stop])
            start = stop
