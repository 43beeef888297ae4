"""What the rows of gather_columns ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_gather_columns(x: torch.Tensor, order: torch.Tensor, out: torch.Tensor) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        x.dim() != 2
        or out.shape != x.shape
        or order.shape != x.shape[1:]
        or order.dtype != torch.int32
        or x.dtype not in _FLOATS
        or x.dtype != out.dtype
        or not (x.device == order.device == out.device)
        or not (x.stride(1) == out.stride(1) == 1)
        or order.stride(0) != 1
    ):
        raise KernelInputError(
            describe("gather_columns", x=x, order=order, out=out),
            wanted="x and out [num_tokens, k] of one fp32, bf16 or fp16 dtype, apart from each other, order [k] int32, inner "
            "stride 1",
            change="pass the column that each column of out is to be, as int32, and a buffer of x's shape",
        )
