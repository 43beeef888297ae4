"""Cases of the gemm family."""

import math

import torch

from rapid_llm.kernels.ops.gemm.rows import DENSE_GEMM
from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.reference import gemm as reference
from rapid_llm.kernels.verify.buffers import Stage, spikes
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check


def _dense_gemm(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    num_tokens, n, k = sizes["num_tokens"], sizes["n"], sizes["k"]
    stage = Stage(DENSE_GEMM, sizes, dtype, device)
    large = hard == "large_magnitude"
    x = stage.place("x", spikes((num_tokens, k), generator) if large else torch.randn(num_tokens, k, generator=generator))
    weight = stage.place("weight", torch.randn(n, k, generator=generator) / math.sqrt(k))
    with_bias = sum(sizes.values()) % 2 == 1
    bias = stage.place("bias", torch.randn(n, generator=generator)) if with_bias else None
    out = stage.unwritten("out", (num_tokens, n))
    expected = reference.dense_gemm(x, weight, bias=bias)
    check = Check("out", lambda: out, expected, *_tolerance(x, weight, expected, dtype))
    return Case(hard or "random", {"x": x, "weight": weight, "out": out, "bias": bias}, [check, *stage.guards()])


def _tolerance(x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """One rounding to ``dtype``, and k fp32 additions whose errors add up like a random walk.

    Each errs by at most half an eps of a partial sum, which is about the root of the sum of squared products. 8 is for the
    worst of many outputs. Products of TF32 operands, off by 2**-11 each, do not fit in.
    """
    fp32, k = torch.finfo(torch.float32).eps, x.shape[1]
    partial = (x.double().square() @ weight.double().square().T).sqrt()
    largest = max((float(values.abs().max()) for values in (partial, expected) if values.numel()), default=0.0)
    rtol = 2 * fp32 + (torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0)
    return rtol, 8 * math.sqrt(k) * fp32 / 2 * largest + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


CASES: dict[str, CaseMaker] = {"dense_gemm": _dense_gemm}
