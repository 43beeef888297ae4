"""Columns in another order in plain torch."""

import torch

from rapid_llm.kernels.ops.quantization.columns_inputs import check_gather_columns


def gather_columns(x: torch.Tensor, order: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write column ``order[j]`` of x into column j of ``out``, for every j, and return it.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        order: [k], int32, each 0 <= id < k; stride 1.
        out: [num_tokens, k], dtype and device of x, apart from it; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/quantization/columns.py::gather_columns. Origin: this repo.
    """
    check_gather_columns(x, order, out)
    return torch.index_select(x, 1, order, out=out)
