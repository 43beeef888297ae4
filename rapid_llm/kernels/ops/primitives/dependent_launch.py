"""Launches that begin while the one before them ends: programmatic dependent launch, of sm90 and later.

A step is a chain of some hundred small kernels. By the order of a stream each waits for the end of the one before it, and then
for its own launch; so launched, its programs are in place already and wait for that end alone (CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization"). In a graph of small kernels an H200 takes 0.74 to 0.92 us a kernel so, and
1.15 to 1.4 without.

Every program of such a kernel waits before it reads what another kernel wrote, those that have nothing to do too: the end of this
kernel tells the next one that those before it have ended as well, which is so only if it waited for them. Weights, which no
kernel writes, may be read before that, and so may index tensors of a step where an op's contract says so: they are there before
its first kernel begins, and a kernel that writes such tensors lets none begin before it ends.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from rapid_llm.kernels.device import DeviceInfo
from rapid_llm.kernels.ops.primitives.codes import has_inline_ptx

_LEAST_SM = 90
_MOST_AHEAD = 32 << 10  # bytes of a program: those of all programs in place at a time stay well below a large cache
_ALIGNED = 16  # bytes; such are asked for
_THREADS = 128  # of the fewest warps that multiply; each asks for one piece of the weight ahead
_STREAMED_UP_TO = 64  # tokens; more are bound by arithmetic


def dependent_launch(device: DeviceInfo) -> dict[str, bool]:
    """Keyword arguments of the launch of a kernel that begins with ``wait_for_inputs``."""
    can = has_inline_ptx() and device.sm is not None and device.sm >= _LEAST_SM
    return {"PDL": can, "launch_pdl": can}


def pieces_ahead(weight: torch.Tensor, num_tokens: int, block_n: int, splits: int = 1) -> tuple[int, int]:
    """What a program of a product asks for of each row of its weight ahead of its inputs: bytes of a piece, and how many pieces.

    Args:
        weight: as ``rows`` of ``piece_ahead``.
        num_tokens: where they are many, the product is bound by arithmetic, and nothing is asked for.
        block_n: rows of the weight that a program multiplies.
        splits: programs that share out a row.
    """
    pieces = max(_THREADS // block_n, 1)
    return piece_ahead(weight, block_n, pieces, splits) if num_tokens <= _STREAMED_UP_TO else 0, pieces


def piece_ahead(rows: torch.Tensor, num_rows: int, pieces: int, splits: int = 1) -> int:
    """Bytes of each of ``pieces`` neighbouring pieces of a row that a program asks for ahead of its inputs; 0 for none.

    Args:
        rows: [n, k] that no kernel writes, of any dtype; there is nothing to ask for where rows do not begin on 16 bytes.
        num_rows: rows of which a program asks for the first pieces.
        splits: programs that share out a row; each asks for no more than its share.
    """
    size = rows.element_size()
    if rows.stride(1) != 1 or rows.data_ptr() % _ALIGNED or rows.stride(0) * size % _ALIGNED:
        return 0
    return min(rows.shape[1] * size // splits, _MOST_AHEAD // num_rows) // (pieces * _ALIGNED) * _ALIGNED


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Let the next kernel's programs come, in a kernel that reads before it waits; ``wait_for_inputs`` does so itself."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr, LET_NEXT_BEGIN: tl.constexpr = True):
    """Let the next kernel's programs come, and wait until all that was launched before this one has ended.

    Without ``LET_NEXT_BEGIN`` those come as programs of this one leave, unless ``let_next_begin`` was called.
    """
    if PDL:
        if LET_NEXT_BEGIN:
            cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def ask_ahead(row_ptrs, piece, PIECES: tl.constexpr, first=0):
    """Have PIECES * piece bytes of rows brought into the L2 cache, before ``wait_for_inputs`` and without waiting.

    For what no kernel writes: weights are read while the kernel before this one still computes. ``row_ptrs``: [N], and ``piece``
    above 0, both as ``piece_ahead`` finds them; ``first``: the byte of a row to begin at, as ``first_ahead`` finds it.
    """
    piece_ptrs = row_ptrs.to(tl.int64)[:, None] + (first + piece * tl.arange(0, PIECES))[None, :]
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [piece_ptrs, piece],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def first_ahead(share, row_bytes, piece, PIECES: tl.constexpr):
    """The byte of a row to ask from, for a program whose share of it begins at byte ``share``, which may be past the end.

    It is a multiple of 16, as what is asked for has to be, and lies so far back that PIECES * piece bytes end within the row.
    """
    return tl.minimum(share, row_bytes - piece * PIECES) // 16 * 16
