"""RMSNorm, alone and with the residual added first (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from collections.abc import Iterator

import torch

from rapid_llm.modules.placement import Placement
from rapid_llm.weights import WeightSlot


class RMSNorm:
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, place: Placement, name: str, size: int, eps: float) -> None:
        self.name, self.eps = name, eps
        self.weight = place.weight(size)
        self._norm = place.kernel("rms_norm", d=size)
        self._add_norm = place.kernel("add_rms_norm", d=size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> [T, size], a new tensor."""
        out = torch.empty_like(x)
        self._norm(x, self.weight, out=out, eps=self.eps)
        return out

    def over(self, x: torch.Tensor) -> None:
        """Write the norm of ``x``, [T, size] or [T, heads, size], over it."""
        self._norm(x, self.weight, out=x, eps=self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place and return the norm of the sum, written over ``x``."""
        self._add_norm(x, residual, self.weight, out=x, eps=self.eps)
        return x

    def weights(self) -> Iterator[WeightSlot]:
        """The scale."""
        yield WeightSlot(f"{self.name}.weight", self.weight)
