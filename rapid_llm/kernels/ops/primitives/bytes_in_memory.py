"""How matrices of a byte an element lie in memory."""

import torch

NARROW_STEP = 64
"""Elements of k that a step takes where bytes are loaded one at a time: each is in a register until the step is multiplied."""

_FULL = 16  # bytes of the widest load


def loads_in_full(*matrices: torch.Tensor) -> bool:
    """Whether every row of these matrices [rows, k] of bytes starts at an address of 16 bytes."""
    return all(matrix.stride(0) % _FULL == 0 and matrix.data_ptr() % _FULL == 0 for matrix in matrices)
