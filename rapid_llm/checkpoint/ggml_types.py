"""The tensor types of GGUF files: their names, their blocks, and blocks back to float32.

A block is 32 or 256 neighbours of a row with a scale of their own; the 256 of a K type have another for every 16 or 32 of them.
Layouts as in ggml (https://github.com/ggml-org/ggml, MIT) and its ``gguf`` package (MIT), whose results these are, bit for bit in
float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# By number, from 0 on; some numbers are out of use.
_NAMES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S "
    "IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 IQ4_NL_8_8 MXFP4"
)
GGML_TYPE_NAMES = dict(enumerate(_NAMES.split()))
_NIBBLE = 15
# What is worked on (700 KB) stays in the second-level cache. The 3968 or 496 blocks that this makes are no power of two: 256 rows
# a power of two apart share a few sets of the first-level cache, and turning them round takes longer (Q4_K by a quarter).
CHUNK_ELEMENTS = 496 * 256
"""Elements dequantised at a time."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class BlockType:
    """One type that is served.

    Attributes:
        dtype: what TensorInfo.dtype says.
        block_elements: elements of a block; 1 for plain numbers.
        block_bytes: bytes of a block.
        dequantise: blocks [n, block_bytes] -> float32, written to [n, block_elements]; None for plain numbers.
    """

    dtype: str
    block_elements: int
    block_bytes: int
    dequantise: Callable[[Bytes, Floats], None] | None = None


def dequantise(blocks: Bytes, kind: BlockType) -> Floats:
    """Blocks [n, block_bytes] as float32 [n, block_elements]. Infinite or NaN scales give infinite or NaN values, silently."""
    out = np.empty((len(blocks), kind.block_elements), np.float32)
    if kind.dequantise is None:
        raise TypeError(f"{kind.dtype} is not quantised")
    with np.errstate(over="ignore", invalid="ignore"):
        step = CHUNK_ELEMENTS // kind.block_elements
        for start in range(0, len(blocks), step):
            kind.dequantise(blocks[start : start + step], out[start : start + step])
    return out


# The arithmetic below runs on transposed chunks: a ufunc's inner loop is then one element position over hundreds or thousands of
# blocks with their scales beside it, not 16 or 32 elements with one scale. That saves up to a fifth of the time. Integers are put
# together as bytes, a quarter of the floats.


def _float16s(columns: Bytes) -> Floats:
    """Bytes [n, 2k] of float16 numbers -> [k, n]."""
    return np.ascontiguousarray(columns.view("<f2").T).astype(np.float32)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """Bytes [n, k] -> [2k, n]: of every ``width`` bytes the low nibbles, then the high ones."""
    groups = np.ascontiguousarray(packed.T).reshape(-1, width, len(packed))
    values = np.empty((len(groups), 2, width, len(packed)), np.uint8)
    np.bitwise_and(groups, _NIBBLE, out=values[:, 0])
    np.right_shift(groups, 4, out=values[:, 1])
    return values.reshape(-1, len(packed))


def _add_high_bits(values: Bytes, high: Bytes, bits: int) -> None:
    """Put bits above nibbles, in place: above values[i] the i-th lowest ``bits`` bits of ``high``.

    values is [8 / bits, ...], high [...].
    """
    mask = (1 << bits) - 1
    for place, part in enumerate(values):
        part |= (high >> bits * place & mask) << 4


def _product(integers: Bytes | NDArray[np.int8], scales: Floats) -> Floats:
    """Integers times their scales. Converted first: a ufunc converts what is mixed in small pieces, which takes longer."""
    values = integers.astype(np.float32)
    values *= scales
    return values


def _q4_0(blocks: Bytes, out: Floats) -> None:
    """Block: scale in float16, then 16 bytes: elements 0..15 in the low nibbles, 16..31 in the high ones, each 8 too large."""
    values = _nibbles(blocks[:, 2:], 16)
    values -= 8
    out[...] = _product(values.view(np.int8), _float16s(blocks[:, :2])).T


def _q4_1(blocks: Bytes, out: Floats) -> None:
    """Block: scale and minimum in float16, then nibbles as in Q4_0, from 0 up."""
    scale, minimum = _float16s(blocks[:, :4])
    values = _product(_nibbles(blocks[:, 4:], 16), scale)
    values += minimum
    out[...] = values.T


def _fives(blocks: Bytes) -> Bytes:
    """Bytes [n, 20] -> integers of 5 bits [32, n]: 4 bytes of fifth bits, element 0's lowest, then nibbles as in Q4_0."""
    values = _nibbles(blocks[:, 4:], 16)
    _add_high_bits(values.reshape(4, 8, -1).swapaxes(0, 1), np.ascontiguousarray(blocks[:, :4].T), 1)
    return values


def _q5_0(blocks: Bytes, out: Floats) -> None:
    """Block: scale in float16, then the integers (see _fives), each 16 too large."""
    values = _fives(blocks[:, 2:])
    values -= 16
    out[...] = _product(values.view(np.int8), _float16s(blocks[:, :2])).T


def _q5_1(blocks: Bytes, out: Floats) -> None:
    """Block: scale and minimum in float16, then the integers (see _fives), from 0 up."""
    scale, minimum = _float16s(blocks[:, :4])
    values = _product(_fives(blocks[:, 4:]), scale)
    values += minimum
    out[...] = values.T


def _q8_0(blocks: Bytes, out: Floats) -> None:
    """Block: scale in float16, then 32 signed bytes."""
    integers = np.ascontiguousarray(blocks[:, 2:].view(np.int8).T)
    out[...] = _product(integers, _float16s(blocks[:, :2])).T


def _scales_and_minima(blocks: Bytes) -> Floats:
    """The head of a Q4_K or Q5_K block -> [2, 8, 1, n]: scale and minimum of each 32 elements.

    Head: scale and minimum of the block in float16, then 12 bytes with 8 scales and 8 minima of 6 bits, to multiply them by. The
    low 6 bits of bytes 0..3 are scales 0..3, those of bytes 4..7 minima 0..3. Bytes 8..11 hold the low 4 bits of scales 4..7 in
    their low nibbles and of minima 4..7 in their high ones; the 2 bits above those are the top bits of bytes 0..3 and 4..7.
    """
    packed = np.ascontiguousarray(blocks[:, 4:16].T).reshape(3, 4, -1)
    parts = np.empty((2, 8, len(blocks)), np.uint8)
    parts[:, :4] = packed[:2] & 63
    parts[0, 4:] = packed[2] & _NIBBLE
    parts[1, 4:] = packed[2] >> 4
    parts[:, 4:] |= packed[:2] >> 2 & 48
    return _product(parts, _float16s(blocks[:, :4])[:, None])[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    """Block: head (see _scales_and_minima), then nibbles, 32 low and 32 high ones from each 32 bytes. Minima are subtracted."""
    scales, minima = _scales_and_minima(blocks)
    values = _product(_nibbles(blocks[:, 16:], 32).reshape(8, 32, -1), scales)
    values -= minima
    out[...] = values.reshape(256, -1).T


def _q5_k(blocks: Bytes, out: Floats) -> None:
    """Block: head as in Q4_K, 32 bytes of fifth bits (bit i of byte j is that of element 32 i + j), then nibbles as in Q4_K."""
    scales, minima = _scales_and_minima(blocks)
    integers = _nibbles(blocks[:, 48:], 32).reshape(8, 32, -1)
    _add_high_bits(integers, np.ascontiguousarray(blocks[:, 16:48].T), 1)
    values = _product(integers, scales)
    values -= minima
    out[...] = values.reshape(256, -1).T


def _q6_k(blocks: Bytes, out: Floats) -> None:
    """Block: 128 bytes of nibbles, 64 of fifth and sixth bits, 16 signed scales of 16 elements each, their scale in float16.

    Each half of the nibbles and of the bits makes 128 elements: the nibbles 64 low, then 64 high ones; bits 2 i and 2 i + 1 of
    byte j belong to element 32 i + j. Integers are 32 too large.
    """
    scales = _product(np.ascontiguousarray(blocks[:, 192:208].view(np.int8).T), _float16s(blocks[:, 208:]))
    integers = _nibbles(blocks[:, :128], 64)
    high = np.ascontiguousarray(blocks[:, 128:192].T).reshape(2, 32, -1)
    _add_high_bits(integers.reshape(2, 4, 32, -1).swapaxes(0, 1), high, 2)
    integers -= 32
    values = _product(integers.view(np.int8).reshape(16, 16, -1), scales[:, None])
    out[...] = values.reshape(256, -1).T


BLOCK_TYPES = {
    "F32": BlockType("float32", 1, 4),
    "F16": BlockType("float16", 1, 2),
    "BF16": BlockType("bfloat16", 1, 2),
    "Q4_0": BlockType("Q4_0", 32, 18, _q4_0),
    "Q4_1": BlockType("Q4_1", 32, 20, _q4_1),
    "Q5_0": BlockType("Q5_0", 32, 22, _q5_0),
    "Q5_1": BlockType("Q5_1", 32, 24, _q5_1),
    "Q8_0": BlockType("Q8_0", 32, 34, _q8_0),
    "Q4_K": BlockType("Q4_K", 256, 144, _q4_k),
    "Q5_K": BlockType("Q5_K", 256, 176, _q5_k),
    "Q6_K": BlockType("Q6_K", 256, 210, _q6_k),
}
"""The types that are served, by ggml name."""
