"""What the rows of rms_norm and add_rms_norm ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        x.dim() not in (2, 3)
        or out.shape != x.shape
        or weight.shape != x.shape[-1:]
        or x.dtype not in _FLOATS
        or not (x.dtype == weight.dtype == out.dtype)
        or not (x.device == weight.device == out.device)
        or not (x.stride(-1) == weight.stride(0) == out.stride(-1) == 1)
    ):
        raise KernelInputError(
            describe("rms_norm", x=x, weight=weight, out=out),
            wanted="x and out [num_tokens, d] or [num_tokens, num_heads, d], weight [d], one float dtype, inner stride 1",
            change="pass views whose last dimension is dense and a weight of that width",
        )


def check_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        x.dim() != 2
        or not (x.shape == residual.shape == out.shape)
        or weight.shape != x.shape[1:]
        or x.dtype not in _FLOATS
        or not (x.dtype == residual.dtype == weight.dtype == out.dtype)
        or not (x.device == residual.device == weight.device == out.device)
        or not (x.stride(1) == residual.stride(1) == weight.stride(0) == out.stride(1) == 1)
    ):
        raise KernelInputError(
            describe("add_rms_norm", x=x, residual=residual, weight=weight, out=out),
            wanted="x, residual and out [num_tokens, d], weight [d], one float dtype, inner stride 1",
            change="pass views whose last dimension is dense and a weight of that width",
        )
