"""Linear layers through the vendor's library: cuBLAS, as torch calls it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rapid_llm.kernels.ops.gemm.inputs import check_dense_gemm

_REDUCTION_FLAGS = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}


def dense_gemm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Write x @ weight.T (+ bias), accumulated in fp32, into ``out`` and return it. In what order it adds is the library's.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        weight: [n, k], same dtype; any strides.
        out: [num_tokens, n], same dtype and device, apart from x; inner stride 1, row stride free.
        bias: [n], same dtype, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/gemm.py::dense_gemm. Origin: this repo.
    """
    check_dense_gemm(x, weight, out, bias)
    if not x.shape[0]:
        return out
    with _sums_in_fp32(x.dtype):
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)


@contextmanager
def _sums_in_fp32(dtype: torch.dtype) -> Iterator[None]:
    """Torch lets cuBLAS round the partial sums of a product that is split along k to 16 bits: not within this."""
    flag = _REDUCTION_FLAGS.get(dtype)
    if flag is None or not getattr(torch.backends.cuda.matmul, flag):
        yield
        return
    setattr(torch.backends.cuda.matmul, flag, False)
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, flag, True)
