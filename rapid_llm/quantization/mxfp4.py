"""Weights of 4-bit floating-point numbers in groups of 32 whose scales are powers of two (OCP Microscaling 1.0), and their files.

quant_method "mxfp4" names the tensors as gpt-oss does: ``<layer>_blocks`` uint8 [n, k / 32, 16], two codes a byte, and
``<layer>_scales`` uint8 [n, k / 32], where b stands for 2**(b - 127). compressed-tensors has ``weight_packed`` [n, k / 2] and
``weight_scale``. Stacks of experts have a leading dimension.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from rapid_llm.errors import CheckpointError
from rapid_llm.quantization.filling import as_scales, intake
from rapid_llm.quantization.formats import Held, Read
from rapid_llm.quantization.names import NamePatterns
from rapid_llm.quantization.nvfp4 import E2M1
from rapid_llm.quantization.packed import Packed, Place, Product, halves_of
from rapid_llm.quantization.settings import Settings
from rapid_llm.weights import WeightSlot

GROUP = 32
"""Elements along k that share a scale; rows of a multiple of it can be kept."""

_NAN = 255  # the one byte that is no power of two


class Mxfp4Weight(Packed):
    """Two e2m1 codes a byte [n, k / 2], the even one in the low half, and a byte b for 2**(b - 127) [n, k / 32]."""

    experts_op = "fused_moe_mxfp4"

    @classmethod
    def empty(cls, place: Place, n: int, k: int, *, experts: int | None = None) -> "Mxfp4Weight":
        """Zeros with scales that are NaN until they are loaded."""
        lead = () if experts is None else (experts,)
        tensors = {
            "weight": torch.zeros(*lead, n, k // 2, dtype=torch.uint8, device=place.device),
            "scales": torch.full((*lead, n, k // GROUP), _NAN, dtype=torch.uint8, device=place.device),
        }
        return cls(n, k, GROUP, tensors)

    def product(self, place: Place) -> Product:
        """By mxfp4_gemm."""
        gemm, weight, scales = place.kernel("mxfp4_gemm", n=self.n, k=self.k), self.weight, self.tensors["scales"]
        return lambda x, out, bias: gemm(x, weight, scales, out=out, bias=bias)

    def numbers(self) -> torch.Tensor:
        """The values."""
        every = torch.tensor([*E2M1, *(-value for value in E2M1)], device=self.device)
        codes = every[halves_of(self.weight).long()].view(self.n, -1, GROUP)
        return (codes * as_scales(self.tensors["scales"])[..., None]).view(self.n, self.k)


@dataclass(frozen=True)
class Mxfp4:
    """The format of one layer.

    Attributes:
        packed: whether the tensors are named and shaped as compressed-tensors does it, else as gpt-oss.
        held, file: the checkpoint's tensors and its name in errors.
    """

    packed: bool
    held: Held = field(compare=False, repr=False)
    file: Path = field(compare=False, repr=False)

    kind: ClassVar[str] = "mxfp4"

    def codes(self, name: str) -> str:
        """See CheckpointFormat."""
        return self._names(name)[0]

    def _names(self, name: str) -> tuple[str, str]:
        return (f"{name}.weight_packed", f"{name}.weight_scale") if self.packed else (f"{name}_blocks", f"{name}_scales")

    def refusal(self, k: int) -> str:
        """See CheckpointFormat."""
        return f"rows of {k}, no multiple of {GROUP}" if k % GROUP else ""

    def empty(self, place: Place, n: int, k: int, *, experts: int | None = None) -> Packed:
        """See WeightFormat."""
        return Mxfp4Weight.empty(place, n, k, experts=experts)

    def slots(self, name: str, part: Packed) -> Iterator[WeightSlot]:
        """See WeightFormat."""
        yield from self._slots(name, part, lambda values: values)

    def stack_slots(self, name: str, stack: Packed, *, interleaved: bool = False) -> Iterator[WeightSlot]:
        """The two tensors of a whole stack of experts ``name``.

        Args:
            interleaved: gate and up rows take turns in the file, as gpt-oss has them; here the gate rows come first.
        """

        def apart(values: torch.Tensor) -> torch.Tensor:
            return torch.cat((values[:, ::2], values[:, 1::2]), 1) if interleaved else values

        yield from self._slots(name, stack, apart)

    def _slots(self, name: str, part: Packed, ordered: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[WeightSlot]:
        rows, groups, (codes, scales) = part.weight.shape[:-1], part.k // GROUP, self._names(name)

        def store_codes(start: int, values: torch.Tensor) -> None:
            part.weight[start : start + len(values)] = ordered(values).reshape(len(values), *rows[1:], part.k // 2)

        def store_scales(start: int, values: torch.Tensor) -> None:
            part.tensors["scales"][start : start + len(values)] = ordered(values)

        def check() -> None:
            bad = int((part.tensors["scales"] == _NAN).sum())
            if bad:
                got, wanted = f"{bad:,} NaN of {part.tensors['scales'].numel():,}", "powers of two"
                change = "fetch the checkpoint again, or quantise it again"
                problem = f"{scales} holds scales that no quantiser writes"
                raise CheckpointError(problem, got=got, wanted=wanted, change=change)

        part.after_loading(check)
        shape = (part.k // 2,) if self.packed else (groups, GROUP // 2)
        yield intake(codes, part, store_codes, (*rows, *shape), ("uint8",))
        yield intake(scales, part, store_scales, (*rows, groups), ("uint8",))

    def dequantised(self, read: Read, name: str) -> torch.Tensor:
        """See CheckpointFormat."""
        codes, scales = (read(tensor) for tensor in self._names(name))
        codes = codes.view(len(codes), -1)
        return e2m1_values(codes) * (2.0 ** (scales.double() - 127)).repeat_interleave(GROUP, 1)


def e2m1_values(octets: torch.Tensor) -> torch.Tensor:
    """Two codes a byte [n, w] to what they stand for [n, 2w] in float64: a sign, two bits of exponent, one of mantissa."""
    codes = torch.stack((octets & 15, octets >> 4), 2).flatten(1)
    exponents, fraction = (codes >> 1 & 3).double(), (codes & 1).double() / 2
    values = torch.where(exponents == 0, fraction, (1 + fraction) * 2 ** (exponents - 1))
    return torch.where(codes >= 8, -values, values)


def mxfp4_rule(settings: Settings, held: Held) -> Callable[[str], Mxfp4 | None]:
    """The format of a layer by its name. Raises: CheckpointError on what is not served."""
    settings.one_of("quant_method", ("mxfp4",))
    ignored = NamePatterns(settings.names("modules_to_not_convert"), f"{settings.file}: modules_to_not_convert")
    settings.log_unknown(("dequantize",))
    form = Mxfp4(False, held, settings.file)
    return lambda name: None if ignored.match(name) else form
