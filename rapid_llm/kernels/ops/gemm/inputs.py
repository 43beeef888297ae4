"""What the rows of dense_gemm ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_dense_gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        not (x.dim() == weight.dim() == 2)
        or x.shape[1] != weight.shape[1]
        or out.shape != (x.shape[0], weight.shape[0])
        or x.dtype not in _FLOATS
        or not (x.dtype == weight.dtype == out.dtype)
        or not (x.device == weight.device == out.device)
        or x.stride(1) != 1
        or out.stride(1) != 1
        or (bias is not None and not _fits(bias, weight))
    ):
        raise KernelInputError(
            describe("dense_gemm", x=x, weight=weight, out=out, bias=bias),
            wanted="x [num_tokens, k], weight [n, k], out [num_tokens, n], bias [n] or None, one float dtype, "
            "inner stride 1 of all but the weight",
            change="pass a buffer of the weight's first size and activations of its second",
        )


def _fits(bias: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``bias`` is one dense value per output of ``weight``."""
    return bias.shape == weight.shape[:1] and bias.dtype == weight.dtype and bias.device == weight.device and bias.stride(0) == 1
