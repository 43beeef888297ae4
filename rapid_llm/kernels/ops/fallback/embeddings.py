"""Embedding look-up in plain torch: one table row per token id."""

import torch

from rapid_llm.kernels.ops.embeddings.inputs import check_vocab_embedding


def vocab_embedding(ids: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write the table row of every id into ``out`` and return it; id -1 writes zeros.

    Args:
        ids: [num_tokens], int32, each -1 <= id < vocab_size; stride 1.
        weight: [vocab_size, hidden_size], fp32 | bf16 | fp16; any strides, so a table kept transposed is served too.
        out: [num_tokens, hidden_size], same dtype and device as weight; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/embeddings.py::vocab_embedding. Origin: this repo.
    """
    check_vocab_embedding(ids, weight, out)
    if ids.shape[0]:
        torch.index_select(weight, 0, ids.clamp(min=0), out=out)
        out.masked_fill_((ids < 0).unsqueeze(1), 0.0)
    return out
