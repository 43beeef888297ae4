"""What the rows of vocab_embedding ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_vocab_embedding(ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
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
