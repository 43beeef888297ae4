"""Cases of int8 activations and of products of int8 numbers."""

import math

import torch

from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.ops.quantization.w8a8_int8_rows import INT8_GEMM, QUANTIZE_INT8
from rapid_llm.kernels.reference.quantization import w8a8_int8 as reference
from rapid_llm.kernels.verify.buffers import Stage, once_rounded, uniform
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check
from rapid_llm.kernels.verify.quantization.fp8 import activations

_FAR = 32.0  # between neighbouring scales, of which two meet in a product


def _quantize_int8(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    num_tokens, k = sizes["num_tokens"], sizes["k"]
    stage = Stage(QUANTIZE_INT8, sizes, dtype, device)
    x = stage.place("x", activations((num_tokens, k), generator, hard))
    out = stage.unwritten("out", (num_tokens, k))
    static = num_tokens % 4 == 2
    if static:
        scales = stage.place("scales", torch.tensor([0.021]))
        codes, expected = reference.quantize_int8(x, scale=scales)[0], scales.double()
    else:
        codes, expected = reference.quantize_int8(x)
        scales = stage.unwritten("scales", (num_tokens, 1))
        scales, expected = (scales[:, 0], expected) if num_tokens % 2 else (scales, expected[:, None])
    checks = [Check("out", lambda: out, codes, 0.0, 0.0), Check("scales", lambda: scales, expected, 0.0, 0.0)]
    return Case(hard or "random", {"x": x, "out": out, "scales": scales, "static": static}, [*checks, *stage.guards()])


def _int8_gemm(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    num_tokens, n, k = (sizes[name] for name in ("num_tokens", "n", "k"))
    stage = Stage(INT8_GEMM, sizes, dtype, device)
    x = stage.place("x", _codes((num_tokens, k), hard, generator))
    weight = stage.place("weight", _codes((n, k), hard, generator))
    one = num_tokens % 3 == 0
    x_scales = stage.place("x_scales", _scales(1 if one else num_tokens, hard, generator) / 127)
    weight_scales = stage.place("weight_scales", _scales(n, hard, generator) / (127 * math.sqrt(k)))
    x_scales = x_scales[:, 0] if one or num_tokens % 2 else x_scales
    weight_scales = weight_scales[:, 0] if n % 2 else weight_scales
    bias = stage.place("bias", torch.randn(n, generator=generator)) if sum(sizes.values()) % 2 else None
    out = stage.unwritten("out", (num_tokens, n))
    expected = reference.int8_gemm(x, weight, x_scales, weight_scales, bias=bias)
    # The sum is exact: two products by scales, a bias and a rounding are left.
    product = expected if bias is None else expected - bias.double()
    largest = max((float(values.abs().max()) for values in (product, bias) if values is not None and values.numel()), default=0.0)
    check = Check("out", lambda: out, expected, *once_rounded(dtype, terms=largest if bias is not None else 0.0))
    arguments = {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales, "out": out, "bias": bias}
    return Case(hard or "random", arguments, [check, *stage.guards()])


def _codes(shape: tuple[int, int], hard: str | None, generator: torch.Generator) -> torch.Tensor:
    """int8 numbers, -128 among them; or the largest ones of one sign, whose sum is the largest there is."""
    if hard == "large_magnitude":
        return torch.full(shape, -128, dtype=torch.int8)
    return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)


def _scales(count: int, hard: str | None, generator: torch.Generator) -> torch.Tensor:
    """About 1 each [count, 1], or every other one 32 times as large."""
    scales = uniform((count, 1), 0.5, 1.5, generator)
    if hard == "far_scales":
        scales[::2] *= _FAR
    return scales


CASES: dict[str, CaseMaker] = {"quantize_int8": _quantize_int8, "int8_gemm": _int8_gemm}
