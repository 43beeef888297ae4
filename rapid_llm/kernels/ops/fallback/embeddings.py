"""Embedding look-up in plain torch: one table row per token id."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def vocab_embedding(ids: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write the table row of every id into ``out`` and return it; id -1 writes zeros.

    Args:
        ids: [num_tokens], int32, each -1 <= id < vocab_size; stride 1.
        weight: [vocab_size, hidden_size], fp32 | bf16 | fp16; any strides, so a table kept transposed is served too.
        out: [num_tokens, hidden_size], same dtype and device as weight; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/embeddings.py::vocab_embedding. Origin: this repo.
    """
    if (
        ids.dim() != 1
        or weight.dim() != 2
        or out.shape != (ids.shape[0], weight.shape[1])
        or ids.dtype != torch.int32
        or weight.dtype not in _FLOATS
        or weight.dtype != out.dtype
        or not (ids.device == weight.device == out.device)
        or ids.stride(0) != 1
        or out.stride(1) != 1
    ):
        raise KernelInputError(
            describe("vocab_embedding", ids=ids, weight=weight, out=out),
            wanted="ids [num_tokens] int32, weight [vocab_size, hidden_size], out [num_tokens, hidden_size], one float dtype",
            change="pass int32 ids and a buffer of the table's width and dtype",
        )
    if ids.shape[0]:
        torch.index_select(weight, 0, ids.clamp(min=0), out=out)
        out.masked_fill_((ids < 0).unsqueeze(1), 0.0)
    return out
