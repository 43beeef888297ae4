"""Weights quantised while they are loaded, from any checkpoint of plain numbers: fp8 and int8 by row, int4 and nvfp4 by groups.

Each row is rounded by itself, so rows may come in any pieces and order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rapid_llm.errors import ConfigError
from rapid_llm.quantization import nvfp4
from rapid_llm.quantization.formats import Read
from rapid_llm.quantization.fp8 import Fp8
from rapid_llm.quantization.packed import Int4Weight, Int8Weight, Packed, Place
from rapid_llm.weights import Intake, WeightSlot

GROUPS = (128, 64, 32)
"""Group sizes of int4, the first that divides a row is taken."""


@dataclass(frozen=True)
class Rounded:
    """The format of a layer whose plain numbers are rounded to ``kind``."""

    kind: str

    def empty(self, place: Place, n: int, k: int, *, experts: int | None = None) -> Packed:
        """A weight before it is loaded. See WeightFormat."""
        if self.kind == "fp8":
            return Fp8("channel", "dynamic").empty(place, n, k, experts=experts)
        if self.kind == "int8":
            return Int8Weight.empty(place, n, k, experts=experts)
        if self.kind == "nvfp4":
            return nvfp4.Nvfp4Weight.empty(place, n, k, experts=experts)
        return Int4Weight.empty(place, n, k, group=next(group for group in GROUPS if k % group == 0), experts=experts)

    def slots(self, name: str, part: Packed) -> Iterator[WeightSlot]:
        """The one tensor of plain numbers."""

        def store(start: int, values: torch.Tensor) -> None:
            part.round(start, values.float())

        yield WeightSlot(f"{name}.weight", Intake(store, (part.n, part.k), part.device))

    def dequantised(self, read: Read, name: str) -> torch.Tensor:
        """The numbers before they are rounded. See WeightFormat."""
        return read(f"{name}.weight").double()


@dataclass(frozen=True)
class OnlineFormats:
    """Every layer is rounded to ``kind``, of ``config.QUANTIZE``."""

    kind: str

    def of(self, names: Sequence[str], k: int) -> Rounded:
        """See Formats. Raises: ConfigError when rows do not divide into groups."""
        groups = {"int4": GROUPS, "nvfp4": (nvfp4.GROUP,)}.get(self.kind, (1,))
        if all(k % group for group in groups):
            got, wanted = f"rows of {k}", f"a multiple of {' or '.join(map(str, groups))}"
            raise ConfigError(f"{names[0]} cannot be {self.kind}", got=got, wanted=wanted, change="use quantize='int8'")
        return Rounded(self.kind)
