"""Cases of products with weights that alone are quantised."""

import math
from collections.abc import Callable

import torch

from rapid_llm.kernels.ops.interfaces import Contract, Sizes
from rapid_llm.kernels.ops.quantization.weight_only_rows import W4A16_GEMM, W8A16_GEMM
from rapid_llm.kernels.reference.quantization import weight_only as reference
from rapid_llm.kernels.verify.buffers import Stage, spikes, uniform, view_of
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check

_FAR = 1000.0  # between the scales of neighbouring groups


def _w8a16_gemm(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    n, k = sizes["n"], sizes["k"]
    stage = Stage(W8A16_GEMM, sizes, dtype, device)
    is_e4m3 = n % 2 == 1
    codes = codes_below((n, k), 256, hard, generator)
    if is_e4m3 and hard != "every_code":
        codes = torch.where(codes & 127 == 127, 0, codes)  # NaN would hide what the row does with other weights
    weight = place_bytes(W8A16_GEMM, "weight", sizes, dtype, codes.to(torch.uint8).to(device))
    weight = weight.view(torch.float8_e4m3fn if is_e4m3 else torch.int8)
    scales = stage.place("scales", _scales(sizes, hard, generator) / 64)
    if scales.shape[1] == 1 and sizes["num_tokens"] % 2:
        scales = scales[:, 0]
    return product_case(stage, sizes, generator, hard, reference.w8a16_gemm, {"weight": weight, "scales": scales})


def _w4a16_gemm(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    n, k = sizes["n"], sizes["k"]
    stage = Stage(W4A16_GEMM, sizes, dtype, device)
    codes = codes_below((n, k // 2), 256, hard, generator)
    weight = place_bytes(W4A16_GEMM, "weight", sizes, dtype, codes.to(torch.uint8).to(device))
    values = _scales(sizes, hard, generator) / 4
    scales = values.to(device) if n % 3 == 0 else stage.place("scales", values)  # fp32 beside any dtype, or x's own
    zeros = None
    if n % 2 == 0 or hard == "every_code":
        points = codes_below(tuple(values.shape), 16, hard, generator)
        if n % 2 == 0 and sizes["num_tokens"] % 2:  # numbers between codes and beyond them
            zeros = _place_floats(points + uniform(points.shape, -4, 4, generator), sizes, dtype, device)
        else:
            zeros = place_bytes(W4A16_GEMM, "zeros", sizes, dtype, points.to(torch.uint8).to(device))
    return product_case(stage, sizes, generator, hard, reference.w4a16_gemm, {"weight": weight, "scales": scales, "zeros": zeros})


def product_case(
    stage: Stage,
    sizes: Sizes,
    generator: torch.Generator,
    hard: str | None,
    twin: Callable[..., torch.Tensor],
    quantised: dict[str, torch.Tensor | None],
) -> Case:
    """The case of these quantised tensors: activations, a bias in every other one, and what must come out."""
    shape = (sizes["num_tokens"], sizes["k"])
    values = spikes(shape, generator) if hard == "large_magnitude" else torch.randn(shape, generator=generator)
    if hard == "far_scales":
        values[1::2] = 0  # and tokens of nothing beside the others
    x = stage.place("x", values)
    with_bias = sum(sizes.values()) % 2 == 1
    bias = stage.place("bias", torch.randn(sizes["n"], generator=generator)) if with_bias else None
    out = stage.unwritten("out", (sizes["num_tokens"], sizes["n"]))
    expected = twin(x, **quantised, bias=bias)
    check = Check("out", lambda: out, expected, *_tolerance(x, twin, quantised, expected))
    return Case(hard or "random", {"x": x, **quantised, "out": out, "bias": bias}, [check, *stage.guards()])


def codes_below(shape: tuple[int, ...], count: int, hard: str | None, generator: torch.Generator) -> torch.Tensor:
    """Codes below ``count``: random ones, or every one in turn."""
    if hard == "every_code":
        return torch.arange(math.prod(shape)).remainder(count).view(shape)
    return torch.randint(0, count, shape, generator=generator)


def _scales(sizes: Sizes, hard: str | None, generator: torch.Generator) -> torch.Tensor:
    """A scale of about 1 / sqrt(k) for each group of each output, or every other one a thousand times as large."""
    n, groups = sizes["n"], sizes["k"] // sizes["group"]
    scales = uniform((n, groups), 0.5, 1.5, generator) / math.sqrt(sizes["k"])
    if hard == "far_scales":
        scales.view(-1)[::2] *= _FAR
    return scales


def place_bytes(contract: Contract, name: str, sizes: Sizes, dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """A view that holds the bytes ``values`` [rows, columns], between others, in the view whose turn it is."""
    rows, columns = values.shape
    view = view_of(contract, name, sizes, dtype)
    stride, offset = columns + (16 if view == "row_strided" else 0), 64 + (view == "offset")
    storage = torch.full((offset + rows * stride + 64,), 0x7F, dtype=torch.uint8, device=values.device)
    placed = storage.as_strided((rows, columns), (stride, 1), offset)
    return placed.copy_(values)


def _place_floats(values: torch.Tensor, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An fp32 view that holds zero points [rows, columns], between NaN, in the view whose turn it is."""
    rows, columns = values.shape
    view = view_of(W4A16_GEMM, "zeros", sizes, dtype)
    stride, offset = columns + (9 if view == "row_strided" else 0), 64 + (view == "offset")
    storage = torch.full((offset + rows * stride + 64,), math.nan, device=device)
    return storage.as_strided((rows, columns), (stride, 1), offset).copy_(values)


def _tolerance(
    x: torch.Tensor, twin: Callable[..., torch.Tensor], quantised: dict[str, torch.Tensor | None], expected: torch.Tensor
) -> tuple[float, float]:
    """One rounding to the dtype of x, and k fp32 additions whose errors add up like a random walk.

    Each errs by at most half an eps of a partial sum, which is about the root of the sum of squared products: those of x with
    the weight that the twin sees, one unit vector of k at a time. 8 is for the worst of many outputs. A weight rounded to
    bf16 before it is multiplied, off by 2**-9 each, does not fit in, nor does a TF32 operand.
    """
    fp32, k = torch.finfo(torch.float32).eps, x.shape[1]
    weight = twin(torch.eye(k, device=x.device), **quantised)  # [K, N]
    partial = (x.double().square() @ weight.square()).sqrt()
    finite = [values[values.isfinite()].abs() for values in (partial, expected)]
    largest = max((float(values.max()) for values in finite if values.numel()), default=0.0)
    rtol = 2 * fp32 + (torch.finfo(x.dtype).eps / 2 if x.dtype != torch.float32 else 0.0)
    return rtol, 8 * math.sqrt(k) * fp32 / 2 * largest + torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps


CASES: dict[str, CaseMaker] = {"w8a16_gemm": _w8a16_gemm, "w4a16_gemm": _w4a16_gemm}
