"""RMSNorm, alone and with the residual added first (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from collections.abc import Iterator

import torch

from rapid_llm.modules.placement import Placement
from rapid_llm.quantization.w8a8 import Activations, Fp8Weight
from rapid_llm.weights import WeightSlot


class RMSNorm:
    """x / rms(x) * weight over the last dimension.

    Args:
        reader: the weight that multiplies what ``add`` returns, if it wants e4m3 numbers: they are rounded on the way then.
    """

    def __init__(self, place: Placement, name: str, size: int, eps: float, *, reader: Fp8Weight | None = None) -> None:
        self.name, self.eps, self.reader = name, eps, reader
        self.weight = place.weight(size)
        self._norm = place.kernel("rms_norm", d=size)
        if reader is None:
            self._add_norm = place.kernel("add_rms_norm", d=size)
        else:
            self._add_norm = place.kernel("add_rms_norm_fp8", d=size, group=reader.group)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> [T, size], a new tensor."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._norm(x, self.weight, out=out, eps=self.eps)
        return out

    def over(self, x: torch.Tensor) -> None:
        """Write the norm of ``x``, [T, size] or [T, heads, size], over it."""
        self._norm(x, self.weight, out=x, eps=self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> Activations:
        """Add ``x`` to ``residual`` in place and return the norm of the sum, written over ``x`` where it is not rounded."""
        if self.reader is None:
            self._add_norm(x, residual, self.weight, out=x, eps=self.eps)
            return x
        rows = self.reader.room(len(x))
        self._add_norm(x, residual, self.weight, out=rows.codes, scales=rows.scales, eps=self.eps)
        return rows

    def weights(self) -> Iterator[WeightSlot]:
        """The scale."""
        yield WeightSlot(f"{self.name}.weight", self.weight)
