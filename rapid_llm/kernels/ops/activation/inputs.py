"""What the rows of swiglu ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_swiglu(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        out.dim() != 2
        or gate_up.shape != (out.shape[0], 2 * out.shape[1])
        or gate_up.dtype not in _FLOATS
        or gate_up.dtype != out.dtype
        or gate_up.device != out.device
        or gate_up.stride(1) != 1
        or out.stride(1) != 1
    ):
        raise KernelInputError(
            describe("swiglu", gate_up=gate_up, out=out),
            wanted="gate_up [num_tokens, 2 * d] and out [num_tokens, d] of one fp32, bf16 or fp16 dtype, inner stride 1",
            change="pass the fused gate-up projection and a buffer of half its width",
        )
