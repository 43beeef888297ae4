"""Cases of e4m3 activations and of products of e4m3 numbers."""

import math

import torch

from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.ops.quantization.fp8_rows import FP8_GEMM, QUANTIZE_FP8
from rapid_llm.kernels.reference.quantization import fp8 as reference
from rapid_llm.kernels.verify.buffers import Stage, spikes, uniform
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check

_FAR = 32.0  # between neighbouring scales, of which two meet in a product
_MATRIX_UNIT = 2.0**-7
"""What a product of e4m3 numbers may be off on a GPU, as a share of the root of the sum of squared terms. A matrix instruction
of an H100 aligns its 32 terms to the largest one and keeps 13 bits behind the point of each; a program adds up to four of them
before it goes on in fp32."""


def activations(shape: tuple[int, int], generator: torch.Generator, hard: str | None) -> torch.Tensor:
    """What a quantiser is given, by the name of a hard input; fp32 on the CPU."""
    values = spikes(shape, generator) if hard == "large_magnitude" else torch.randn(shape, generator=generator)
    if hard == "zero_rows":
        values[::2] = 0.0
    elif hard == "tiny":  # of bf16 and fp32: a scale that is itself no normal number, and one that just is
        values *= torch.tensor([1e-42, 1e-36, 1e-30])[torch.arange(shape[0]) % 3, None]
    elif hard == "not_finite" and shape[0]:
        values[::2, 1::5], values[1::3, ::7], values[1::3, 2::7] = math.nan, math.inf, -math.inf
    return values


def _quantize_fp8(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    num_tokens, k, group = (sizes[name] for name in ("num_tokens", "k", "group"))
    stage = Stage(QUANTIZE_FP8, sizes, dtype, device)
    x = stage.place("x", activations((num_tokens, k), generator, hard))
    out = stage.unwritten("out", (num_tokens, k))
    static = group == k and num_tokens % 4 == 2
    if static:
        scales = stage.place("scales", torch.tensor([0.0078]))
        numbers, expected = reference.quantize_fp8(x, scale=scales)[0], scales.double()
    else:
        numbers, expected = reference.quantize_fp8(x, group=group)
        scales = stage.unwritten("scales", expected.shape)
        if expected.shape[1] == 1 and num_tokens % 2:
            scales, expected = scales[:, 0], expected[:, 0]
    checks = [
        Check("out", lambda: out.view(torch.uint8), bytes_of(numbers), 0.0, 0.0),
        Check("scales", lambda: scales, expected, 0.0, 0.0),
    ]
    return Case(hard or "random", {"x": x, "out": out, "scales": scales, "static": static}, [*checks, *stage.guards()])


def bytes_of(numbers: torch.Tensor) -> torch.Tensor:
    """The bytes of e4m3 numbers that are given as float64."""
    return numbers.float().to(torch.float8_e4m3fn).view(torch.uint8)


def _fp8_gemm(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    num_tokens, n, k = (sizes[name] for name in ("num_tokens", "n", "k"))
    stage = Stage(FP8_GEMM, sizes, dtype, device)
    x = stage.place("x", _codes((num_tokens, k), hard, generator))
    weight_codes = _codes((n, k), hard, generator)
    if hard == "every_code":
        weight_codes[-1, :2] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = stage.place("weight", weight_codes)
    x_shape, weight_shape = _scale_shapes(sizes)
    x_scales = stage.place("x_scales", _scales(x_shape, hard, generator) / 448)
    weight_scales = stage.place("weight_scales", _scales(weight_shape, hard, generator) / (448 * math.sqrt(k)))
    if x_shape[1] == weight_shape[1] == 1:  # a vector as well as a column
        x_scales = x_scales[:, 0] if num_tokens % 2 or x_shape[0] == 1 else x_scales
        weight_scales = weight_scales[:, 0] if n % 2 or weight_shape[0] == 1 else weight_scales
    bias = stage.place("bias", torch.randn(n, generator=generator)) if sum(sizes.values()) % 2 else None
    out = stage.unwritten("out", (num_tokens, n))
    expected = reference.fp8_gemm(x, weight, x_scales, weight_scales, bias=bias)
    check = product_check(
        out, expected, reference.dequantised(x, x_scales), reference.dequantised(weight, weight_scales), _MATRIX_UNIT
    )
    arguments = {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales, "out": out, "bias": bias}
    return Case(hard or "random", arguments, [check, *stage.guards()])


def product_check(out: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, matrix_unit: float) -> Check:
    """That ``out`` is ``expected`` = x @ weight.T: each element as a share of the root of the sum of its squared terms.

    It may be off by one rounding to the dtype of out, by k fp32 additions whose errors add up like a random walk (8 for the worst
    of many) and, on a GPU, by ``matrix_unit``.
    """
    size = (x.square() @ weight.square().T).sqrt()
    size = torch.where(size.isfinite() & (size > 0), size, 1.0)
    fp32, target = torch.finfo(torch.float32).eps, torch.finfo(out.dtype)
    rtol = 4 * fp32 + (target.eps / 2 if out.dtype != torch.float32 else 0.0)
    atol = 8 * math.sqrt(x.shape[1]) * fp32 / 2 + (matrix_unit if out.is_cuda else 0.0)
    if size.numel():
        atol += target.smallest_normal * target.eps / float(size.min())
    return Check("out", lambda: out.double() / size, expected / size, rtol, atol)


def _scale_shapes(sizes: Sizes) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the scales of x and of the weight: every kind that the contract allows comes up in its sweep."""
    num_tokens, n, k, group = (sizes[name] for name in ("num_tokens", "n", "k", "group"))
    if group != k:
        groups = -(-k // group)
        return (num_tokens, groups), (n if num_tokens % 4 == 0 else -(-n // group), groups)
    return (1 if num_tokens % 3 == 0 else num_tokens, 1), (1 if n % 4 == 0 and k % 16 == 0 else n, 1)


def _scales(shape: tuple[int, int], hard: str | None, generator: torch.Generator) -> torch.Tensor:
    """About 1 each, or every other one 32 times as large."""
    scales = uniform(shape, 0.5, 1.5, generator)
    if hard == "far_scales":
        scales.view(-1)[::2] *= _FAR
    return scales


def _codes(shape: tuple[int, int], hard: str | None, generator: torch.Generator) -> torch.Tensor:
    """e4m3 numbers: values as a quantiser leaves them, any code but the two NaNs, or the largest ones alone."""
    if hard == "large_magnitude":
        return torch.where(torch.randint(0, 2, shape, generator=generator) == 0, 448.0, -448.0).to(torch.float8_e4m3fn)
    if hard == "every_code":
        codes = torch.randint(0, 256, shape, generator=generator)
        return torch.where(codes % 128 == 127, 0, codes).to(torch.uint8).view(torch.float8_e4m3fn)
    return (100 * torch.randn(shape, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)


CASES: dict[str, CaseMaker] = {"quantize_fp8": _quantize_fp8, "fp8_gemm": _fp8_gemm}
