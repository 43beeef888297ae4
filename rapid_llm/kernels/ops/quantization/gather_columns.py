"""Columns in another order. Memory-bound; one program per (token, column tile), whose loads stay within one row."""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.quantization.columns_inputs import check_gather_columns
from rapid_llm.kernels.ops.tile_policy import resolve_tiles


def gather_columns(x: torch.Tensor, order: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write column ``order[j]`` of x into column j of ``out``, for every j, and return it.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        order: [k], int32, each 0 <= id < k; stride 1.
        out: [num_tokens, k], dtype and device of x, apart from it; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/quantization/columns.py::gather_columns. Origin: this repo.
    """
    check_gather_columns(x, order, out)
    num_tokens, k = x.shape
    if num_tokens and k:
        device = launch_device(x)
        tile = resolve_tiles("gather_columns", device=device, dtype=x.dtype, num_tokens=num_tokens, k=k)
        grid = (num_tokens, triton.cdiv(k, tile.BLOCK_N))
        _gather_columns_kernel[grid](
            x, order, out, x.stride(0), out.stride(0), k, **tile.launch(), **dependent_launch(device)
        )  # fmt: skip
    return out


@triton.jit
def _gather_columns_kernel(x_ptr, order_ptr, out_ptr, x_stride, out_stride, k, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < k
    sources = tl.load(order_ptr + cols, mask=mask, other=0)
    values = tl.load(x_ptr + token * x_stride + sources, mask=mask, other=0.0)
    tl.store(out_ptr + token * out_stride + cols, values, mask=mask)
