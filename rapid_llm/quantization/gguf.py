"""GGUF blocks kept in the bits they have: their integers, scales and minima, laid out as the weight-only products read them.

Nothing is rounded. A type that is not in KEPT, and a layer stacked of types that no one way of keeping holds, becomes plain
numbers. Layouts of blocks: see checkpoint/ggml_types.py.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rapid_llm.quantization.formats import Read
from rapid_llm.quantization.packed import Int4Weight, Int8Weight, Packed, Place
from rapid_llm.weights import Intake, WeightSlot

GROUP = 32
"""Neighbours along k that share a scale, in every kept type."""

Blocks = torch.Tensor
"""uint8 [rows, blocks of a row, bytes of a block]."""


class Int4Numbered(Int4Weight):
    """4-bit codes whose zero points are fp32 numbers: with (code - zero) * scale, a minimum m is the zero point -m / scale."""

    experts_op = ""

    @classmethod
    def empty(
        cls, place: Place, n: int, k: int, *, group: int = 0, zeros: bool = True, experts: int | None = None
    ) -> "Int4Weight":
        """As Int4Weight."""
        weight = super().empty(place, n, k, group=group, zeros=zeros, experts=experts)
        weight.tensors["zeros"] = torch.full_like(weight.tensors["scales"], torch.nan)
        return weight


@dataclass(frozen=True)
class KeptType:
    """A ggml type that is kept.

    Attributes:
        bits: of a code.
        has_minima: whether a group has a minimum beside its scale.
        block_bytes: bytes of a block.
        unpack: blocks -> codes as they lie in a weight [rows, k] or [rows, k / 2], fp32 scales and minima, which are taken off,
            [rows, k / 32].
    """

    bits: int
    has_minima: bool
    block_bytes: int
    unpack: Callable[[Blocks], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def _halves(blocks: Blocks, start: int, count: int = 1) -> torch.Tensor:
    """float16 numbers at byte ``start`` of each block -> fp32 [rows, blocks, count]."""
    return blocks[:, :, start : start + 2 * count].contiguous().view(torch.float16).float()


def _paired(nibbles: torch.Tensor, width: int) -> torch.Tensor:
    """Bytes of each ``width`` of which the low halves come first -> bytes of two neighbours each, [rows, k / 2]."""
    bytes_ = nibbles.reshape(len(nibbles), -1, 1, width)
    codes = torch.cat((bytes_ & 15, bytes_ >> 4), 2).view(len(nibbles), -1)
    return codes[:, ::2] | codes[:, 1::2] << 4


def _q4_0(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor, None]:
    return _paired(blocks[:, :, 2:], 16), _halves(blocks, 0).flatten(1), None


def _q4_1(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales, minima = _halves(blocks, 0, 2).unbind(2)
    return _paired(blocks[:, :, 4:], 16), scales, -minima


def _q8_0(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor, None]:
    return blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks, 0).flatten(1), None


def _q4_k(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The 6-bit scales and minima of a block's eight groups: the first four in the low bits of the first eight bytes, of the
    others four bits in the last four bytes and two above those low ones.
    """
    first, second, third = blocks[:, :, 4:16].reshape(*blocks.shape[:2], 3, 4).unbind(2)
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), 2)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), 2)
    scale, minimum = _halves(blocks, 0), _halves(blocks, 2)
    return _paired(blocks[:, :, 16:], 32), (scales * scale).flatten(1), (minima * minimum).flatten(1)


KEPT = {
    "Q4_0": KeptType(4, False, 18, _q4_0),
    "Q4_1": KeptType(4, True, 20, _q4_1),
    "Q8_0": KeptType(8, False, 34, _q8_0),
    "Q4_K": KeptType(4, True, 144, _q4_k),
}
"""The types that are kept, by ggml name. Codes of 5 and 6 bits have no product of their own."""

OPS = {4: "w4a16_gemm", 8: "w8a16_gemm"}
"""What multiplies by codes of so many bits."""


@dataclass(frozen=True)
class KeptBlocks:
    """The format of a layer whose blocks are kept.

    Attributes:
        kind: the ggml types of its parts, each once.
        types: ggml type by tensor name.
    """

    kind: str
    types: Mapping[str, str]

    def empty(self, place: Place, n: int, k: int, *, experts: int | None = None) -> Packed:
        """A weight before it is loaded. See WeightFormat."""
        kinds = [KEPT[name] for name in self.kind.split("+")]
        if kinds[0].bits == 8:
            return Int8Weight.empty(place, n, k, group=GROUP, experts=experts)
        if any(kind.has_minima for kind in kinds):
            return Int4Numbered.empty(place, n, k, group=GROUP, experts=experts)
        return Int4Weight.empty(place, n, k, group=GROUP, zeros=False, experts=experts)

    def slots(self, name: str, part: Packed) -> Iterator[WeightSlot]:
        """The one tensor of blocks."""
        dtype = self.types[f"{name}.weight"]
        kept = KEPT[dtype]

        def store(start: int, rows: torch.Tensor) -> None:
            codes, scales, minima = kept.unpack(rows.view(len(rows), -1, kept.block_bytes))
            where = slice(start, start + len(rows))
            if "zeros" in part.tensors:
                codes, scales, zeros = _zero_points(codes, scales, minima)
                part.tensors["zeros"][where] = zeros
            part.weight[where], part.tensors["scales"][where] = codes, scales

        target = Intake(store, (part.n, part.k), part.device, as_stored=True)
        yield WeightSlot(f"{name}.weight", target, (dtype,))

    def dequantised(self, read: Read, name: str) -> torch.Tensor:
        """See WeightFormat."""
        return read(f"{name}.weight").double()


def _zero_points(
    codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and zero points whose (code - zero) * scale is code * scale - minimum; 8 is zero where there are no minima.

    A group of scale 0 holds its minimum alone: that becomes the scale, of codes 0 with the zero point 1.
    """
    if minima is None:
        return codes, scales, torch.full_like(scales, 8.0)
    flat = scales == 0
    zeros = torch.where(flat, 1.0, minima / torch.where(flat, 1.0, scales))
    codes = codes.view(*scales.shape, -1) * ~flat[..., None]
    return codes.flatten(1), torch.where(flat, minima, scales), zeros


@dataclass(frozen=True)
class GgufFormats:
    """Layers of a GGUF file keep their blocks where they can.

    Attributes:
        types: ggml type by tensor name.
        ops: the products that may be used.
    """

    types: Mapping[str, str]
    ops: Collection[str] = tuple(OPS.values())

    def of(self, names: Sequence[str], k: int) -> KeptBlocks | None:
        """See Formats; None where a part's type is not kept, or codes of 4 and of 8 bits would be stacked."""
        types = [self.types.get(f"{name}.weight", "") for name in names]
        if any(name not in KEPT for name in types):
            return None
        bits = {KEPT[name].bits for name in types}
        if len(bits) > 1 or OPS[bits.pop()] not in self.ops:
            return None
        return KeptBlocks("+".join(dict.fromkeys(types)), self.types)
