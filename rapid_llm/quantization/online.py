"""Weights quantised while they are loaded, from any checkpoint of plain numbers: int8 by output, int4 by groups of a row.

Each row is rounded by itself, so rows may come in any pieces and order. Rounding is to the nearest of evenly spaced values: int8
from -127 to 127 times the row's largest magnitude over 127; int4 from the group's least to its largest value in 15 steps.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from rapid_llm.errors import ConfigError

GROUPS = (128, 64, 32)
"""Group sizes of int4, the first that divides a row is taken."""


class Place(Protocol):
    """What a matrix needs of where it lies."""

    @property
    def device(self) -> torch.device:
        """Where its tensors go."""

    def kernel(self, op: str, **sizes: int) -> Callable[..., Any]:
        """What serves an op there."""


class QuantisedMatrix(Protocol):
    """A matrix [n, k] that a layer multiplies by."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ matrix.T (+ bias) into ``out``."""

    def rows(self, start: int, stop: int) -> "Rows":
        """Where a loader puts these rows."""


class Rows:
    """Rows of a matrix to be: takes float values as a parameter would, and rounds them on their way in.

    Attributes:
        shape, device: as of a tensor.
    """

    def __init__(
        self, store: Callable[[int, torch.Tensor], None], shape: tuple[int, int], device: torch.device, start: int
    ) -> None:
        self._store, self._start = store, start
        self.shape, self.device = torch.Size(shape), device

    def __getitem__(self, rows: slice) -> "Rows":
        """Some of the rows."""
        first, last, _ = rows.indices(self.shape[0])
        return Rows(self._store, (last - first, self.shape[1]), self.device, self._start + first)

    def copy_(self, values: torch.Tensor) -> "Rows":
        """Round ``values``, of this shape and any float dtype, and keep them."""
        self._store(self._start, values.to(self.device, torch.float32))
        return self


class Int8Matrix:
    """int8 [n, k] and one fp32 scale an output."""

    def __init__(self, place: Place, n: int, k: int) -> None:
        self.weight = torch.zeros(n, k, dtype=torch.int8, device=place.device)
        self.scales = torch.full((n,), torch.nan, device=place.device)
        self._gemm = place.kernel("w8a16_gemm", n=n, k=k, group=k)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ matrix.T (+ bias) into ``out``."""
        self._gemm(x, self.weight, self.scales, out=out, bias=bias)

    def rows(self, start: int, stop: int) -> Rows:
        """Where a loader puts these rows."""
        return Rows(self._put, (stop - start, self.weight.shape[1]), self.weight.device, start)

    def _put(self, start: int, values: torch.Tensor) -> None:
        scales = values.abs().amax(1) / 127
        codes = (values / torch.where(scales > 0, scales, 1.0)[:, None]).round_()
        self.weight[start : start + len(values)] = codes.to(torch.int8)
        self.scales[start : start + len(values)] = scales


class Int4Matrix:
    """Two 4-bit codes a byte [n, k / 2], with a scale and a zero code [n, k / group] a group: value = (code - zero) * scale."""

    def __init__(self, place: Place, n: int, k: int) -> None:
        self.group = next(group for group in GROUPS if k % group == 0)
        self.weight = torch.zeros(n, k // 2, dtype=torch.uint8, device=place.device)
        self.scales = torch.full((n, k // self.group), torch.nan, device=place.device)
        self.zeros = torch.zeros(n, k // self.group, dtype=torch.uint8, device=place.device)
        self._gemm = place.kernel("w4a16_gemm", n=n, k=k, group=self.group)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ matrix.T (+ bias) into ``out``."""
        self._gemm(x, self.weight, self.scales, out=out, zeros=self.zeros, bias=bias)

    def rows(self, start: int, stop: int) -> Rows:
        """Where a loader puts these rows."""
        return Rows(self._put, (stop - start, 2 * self.weight.shape[1]), self.weight.device, start)

    def _put(self, start: int, values: torch.Tensor) -> None:
        groups = values.view(len(values), -1, self.group)
        low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)  # zero itself stays exact
        scales = (high - low) / 15
        steps = torch.where(scales > 0, scales, 1.0)
        zeros = (-low / steps).round_()
        codes = ((groups / steps[..., None]).round_() + zeros[..., None]).clamp_(0, 15).to(torch.uint8).view(len(values), -1)
        stop = start + len(values)
        self.weight[start:stop] = codes[:, ::2] | codes[:, 1::2] << 4
        self.scales[start:stop], self.zeros[start:stop] = scales, zeros.to(torch.uint8)


def quantised_matrix(kind: str, place: Place, name: str, n: int, k: int) -> QuantisedMatrix:
    """The matrix of a layer under the format ``kind``.

    Raises: ConfigError, naming the layer, when its rows do not divide into groups.
    """
    if kind == "int8":
        return Int8Matrix(place, n, k)
    if all(k % group for group in GROUPS):
        wanted = f"a multiple of {' or '.join(map(str, GROUPS))}"
        raise ConfigError(f"{name} cannot be int4", got=f"rows of {k}", wanted=wanted, change="use quantize='int8'")
    return Int4Matrix(place, n, k)
