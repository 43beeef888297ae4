"""Linear layers in plain torch: one matrix product into the caller's buffer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rapid_llm.kernels.ops.gemm import library_gemm
from rapid_llm.kernels.ops.gemm.inputs import check_dense_gemm


def dense_gemm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Write x @ weight.T (+ bias), accumulated in fp32, into ``out`` and return it.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        weight: [n, k], same dtype; any strides. On a CPU the transposed view of a [k, n] tensor is the fast one.
        out: [num_tokens, n], same dtype and device, apart from x; inner stride 1, row stride free.
        bias: [n], same dtype, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/gemm.py::dense_gemm. Origin: this repo.
    """
    check_dense_gemm(x, weight, out, bias)
    if not x.shape[0]:
        return out
    if (
        x.is_cuda and x.dtype == torch.float16
    ):  # cuBLAS rounds partial sums to fp16, whatever it is told, unless the result is fp32
        product = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out.copy_(product if bias is None else product.add_(bias))
    if x.is_cuda:  # where sums in fp32 must be asked for
        return library_gemm.dense_gemm(x, weight, out=out, bias=bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def prepare_dense_gemm(
    shared: dict[Any, Any], x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[Callable[[], object], ...]:
    """The call that repeats ``dense_gemm`` on the same tensors."""
    if bias is None:
        return (partial(torch.mm, x, weight.t(), out=out),)
    return (partial(torch.addmm, bias, x, weight.t(), out=out),)
