"""Embedding look-up: one table row per token id. Memory-bound, a gather of rows; one program per (token, column tile)."""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.embeddings.inputs import check_vocab_embedding
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.tile_policy import resolve_tiles


def vocab_embedding(ids: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write the table row of every id into ``out`` and return it; id -1 writes zeros.

    Args:
        ids: [num_tokens], int32, each -1 <= id < vocab_size; stride 1.
        weight: [vocab_size, hidden_size], fp32 | bf16 | fp16; any strides, so a table kept transposed is served too.
        out: [num_tokens, hidden_size], same dtype and device as weight; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/embeddings.py::vocab_embedding. Origin: this repo.
    """
    check_vocab_embedding(ids, weight, out)
    num_tokens, hidden_size = out.shape
    if num_tokens and hidden_size:
        sizes = {"num_tokens": num_tokens, "vocab_size": weight.shape[0], "hidden_size": hidden_size}
        device = launch_device(out)
        tile = resolve_tiles("vocab_embedding", device=device, dtype=out.dtype, **sizes)
        grid = (num_tokens, triton.cdiv(hidden_size, tile.BLOCK_N))
        strides = (weight.stride(0), weight.stride(1), out.stride(0))
        _vocab_embedding_kernel[grid](weight, out, ids, *strides, hidden_size, **tile.launch(), **dependent_launch(device))
    return out


@triton.jit
def _vocab_embedding_kernel(
    weight_ptr,
    out_ptr,
    ids_ptr,
    weight_stride,
    weight_col_stride,
    out_stride,
    hidden_size,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)

    row = tl.load(ids_ptr + token).to(tl.int64)  # id * stride can pass 2**31, and so can column * stride of a transposed table
    row_ptrs = weight_ptr + row * weight_stride + cols.to(tl.int64) * weight_col_stride
    width = tl.where(row >= 0, hidden_size, 0)  # the pointers of id -1 lie before the table
    values = tl.load(row_ptrs, mask=cols < width, other=0.0)

    tl.store(out_ptr + token * out_stride + cols, values, mask=cols < hidden_size)
