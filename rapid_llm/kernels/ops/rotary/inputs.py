"""What the rows of rope ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        not (q.dim() == k.dim() == 3)
        or not (q.shape[0] == k.shape[0] == positions.shape[0])
        or q.shape[2] != k.shape[2]
        or positions.dim() != 1
        or cos_sin.dim() != 2
        or cos_sin.shape[1] > q.shape[2]
        or cos_sin.shape[1] % 2
        or q.dtype not in _FLOATS
        or q.dtype != k.dtype
        or positions.dtype != torch.int32
        or cos_sin.dtype != torch.float32
        or not (q.device == k.device == positions.device == cos_sin.device)
        or not (q.stride(2) == k.stride(2) == positions.stride(0) == cos_sin.stride(1) == 1)
    ):
        raise KernelInputError(
            describe("rope", q=q, k=k, positions=positions, cos_sin=cos_sin),
            wanted="q and k [num_tokens, heads, head_dim] of one float dtype, positions [num_tokens] int32, "
            "cos_sin [max_positions, even rotary_dim <= head_dim] fp32, inner stride 1",
            change="pass head views of the projections and the table of the model's rotary_dim",
        )
