"""The tensor types of GGUF files: their names, their blocks, and blocks back to float32.

A block is 32 neighbours of a row with a scale of their own. Layouts as in ggml (https://github.com/ggml-org/ggml, MIT);
results are bit for bit those of the ``gguf`` package in float32.
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
_CHUNK = 4096  # blocks at a time: what is worked on (650 KB) stays in the second-level cache
_NIBBLE = 15

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class BlockType:
    """One type that is served.

    Attributes:
        dtype: what TensorInfo.dtype says.
        block_elements: elements of a block; 1 for plain numbers.
        block_bytes: bytes of a block.
        dequantise: blocks [n, block_bytes] -> float32, written to [n, 32]; None for plain numbers.
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
        for start in range(0, len(blocks), _CHUNK):
            kind.dequantise(blocks[start : start + _CHUNK], out[start : start + _CHUNK])
    return out


# The arithmetic below runs on transposed chunks: a ufunc's inner loop is then one element position over thousands of blocks with
# their scales beside it, not 32 elements with one scale. That halves the time.


def _q4_1(blocks: Bytes, out: Floats) -> None:
    """Block: scale and minimum in float16, then 16 bytes: elements 0..15 in the low nibbles, 16..31 in the high ones."""
    scales = np.ascontiguousarray(blocks[:, :4].view("<f2").T).astype(np.float32)  # [2, n]
    packed = np.ascontiguousarray(blocks[:, 4:].T)  # [16, n]
    values = np.empty((32, len(blocks)), np.float32)
    values[:16] = packed & _NIBBLE
    values[16:] = packed >> 4
    values *= scales[0]
    values += scales[1]
    out[...] = values.T


def _q8_0(blocks: Bytes, out: Floats) -> None:
    """Block: scale in float16, then 32 signed bytes."""
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2")[:, 0].astype(np.float32)  # [n]
    values = np.ascontiguousarray(blocks[:, 2:].view(np.int8).T).astype(np.float32)  # [32, n]
    values *= scales
    out[...] = values.T


BLOCK_TYPES = {
    "F32": BlockType("float32", 1, 4),
    "F16": BlockType("float16", 1, 2),
    "Q4_1": BlockType("Q4_1", 32, 20, _q4_1),
    "Q8_0": BlockType("Q8_0", 32, 34, _q8_0),
}
"""The types that are served, by ggml name."""
