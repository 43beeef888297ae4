"""Linear layer with a weight of e2m1 codes and a power of two for each 32 along k: the kernel is that of fp4_product.py."""

import torch

from rapid_llm.kernels.ops.quantization.fp4_inputs import check_mxfp4_gemm
from rapid_llm.kernels.ops.quantization.fp4_product import launch_product


def mxfp4_gemm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Write x @ (e2m1 * 2 ** (scales - 127)).T (+ bias), accumulated in fp32 and rounded once, into ``out`` and return it.

    Weights are exact for every scale and in every dtype of x; an activation is never rounded.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; k a multiple of 32; inner stride 1, row stride free.
        weight: [n, k / 2], uint8, two e2m1 codes a byte: element 2i in the low half, 2i + 1 in the high one; inner stride 1,
            rows begin on 4 bytes. From sm90 on it may be read before the kernel launched last has ended, so it is not what that
            one writes.
        scales: [n, k / 32], uint8, biased exponents of powers of two (e8m0); 255 is NaN. Inner stride 1, row stride free.
        out: [num_tokens, n], dtype and device of x, apart from it; inner stride 1, row stride free.
        bias: [n], dtype of x, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/quantization/fp4.py::mxfp4_gemm. Origin: this repo; the format is that of Rouhani et al. 2023,
    https://arxiv.org/abs/2310.10537.
    """
    check_mxfp4_gemm(x, weight, scales, out, bias)
    return launch_product("mxfp4_gemm", x, weight, scales, None, bias, out)
