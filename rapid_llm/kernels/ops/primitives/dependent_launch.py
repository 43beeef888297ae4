"""Launches that begin while the one before them ends: programmatic dependent launch, of sm90 and later.

A step is a chain of some hundred small kernels. By the order of a stream each waits for the end of the one before it, and then
for its own launch; so launched, its programs are in place already and wait for that end alone (CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization"). In a graph of small kernels an H200 takes 0.74 to 0.92 us a kernel so, and
1.15 to 1.4 without.

Every program of such a kernel waits before it reads what another kernel wrote, those that have nothing to do too: the end of this
kernel tells the next one that those before it have ended as well, which is so only if it waited for them. Weights, which no
kernel writes, may be read before that.
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


def dependent_launch(device: DeviceInfo) -> dict[str, bool]:
    """Keyword arguments of the launch of a kernel that begins with ``wait_for_inputs``."""
    can = has_inline_ptx() and device.sm is not None and device.sm >= _LEAST_SM
    return {"PDL": can, "launch_pdl": can}


def piece_ahead(rows: torch.Tensor, num_rows: int, pieces: int) -> int:
    """Bytes of each of ``pieces`` neighbouring pieces of a row that a program asks for ahead of its inputs; 0 for none.

    Args:
        rows: [..., k] of any dtype; there is nothing to ask for where its rows do not all begin on 16 bytes.
        num_rows: how many of them a program asks for.
    """
    size = rows.element_size()
    apart = [stride * size for stride in rows.stride()[:-1]]
    if rows.stride(-1) != 1 or not rows.numel() or any(place % _ALIGNED for place in (rows.data_ptr(), *apart)):
        return 0
    return min(rows.shape[-1] * size, _MOST_AHEAD // num_rows) // (pieces * _ALIGNED) * _ALIGNED


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Let the next kernel's programs come, in a kernel that reads weights before it waits; ``wait_for_inputs`` does so itself."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr, LET_NEXT_BEGIN: tl.constexpr = True):
    """Let the next kernel's programs come, and wait until all that was launched before this one has ended.

    Without ``LET_NEXT_BEGIN`` those come as programs of this one leave.
    """
    if PDL:
        if LET_NEXT_BEGIN:
            cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def ask_ahead(row_ptrs, piece, PIECES: tl.constexpr):
    """Have the first PIECES * piece bytes of rows brought into the L2 cache, before ``wait_for_inputs`` and without waiting.

    For what no kernel writes: weights are read while the kernel before this one still computes. ``row_ptrs``: [N], and ``piece``
    above 0, both as ``piece_ahead`` finds them.
    """
    piece_ptrs = row_ptrs.to(tl.int64)[:, None] + piece * tl.arange(0, PIECES)[None, :]
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [piece_ptrs, piece],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
