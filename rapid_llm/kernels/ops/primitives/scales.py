"""Which elements of a quantised row share a scale."""

import torch

GROUP = 128
"""Elements along a row that share a scale where a row has more than one."""


def group_of(scales: torch.Tensor, rows: int, columns: int) -> int:
    """Elements of a row that share a scale: all of ``columns`` for scales [rows] or [rows, 1], 128 for [rows,
    ceil(columns / 128)], 0 where the scales have any other shape."""
    shape = tuple(scales.shape)
    if shape in ((rows,), (rows, 1)):
        return columns
    return GROUP if shape == (rows, -(-columns // GROUP)) else 0


def strides_of(scales: torch.Tensor) -> tuple[int, int]:
    """What a step along the rows and one along the groups of a row are in elements; 0 where there is one for all."""
    along_rows = scales.stride(0) if scales.shape[0] != 1 else 0
    return along_rows, scales.stride(1) if scales.dim() == 2 and scales.shape[1] != 1 else 0
