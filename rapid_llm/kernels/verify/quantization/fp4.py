"""Cases of 4-bit floating-point weights: their products and their quantiser."""

import math

import torch

from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.ops.quantization.fp4_rows import MXFP4_GEMM, MXFP4_GROUP, NVFP4_GEMM, NVFP4_GROUP, QUANTIZE_NVFP4
from rapid_llm.kernels.reference.quantization import fp4 as reference
from rapid_llm.kernels.verify.buffers import Stage, spikes, uniform
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check
from rapid_llm.kernels.verify.quantization.weight_only import codes_below, place_bytes, product_case

_FAR = 1000.0  # between the scales of neighbouring groups
_FILLER = 0x7F  # in and around bytes before the call; NaN as e4m3


def _nvfp4_gemm(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    n, k = sizes["n"], sizes["k"]
    stage = Stage(NVFP4_GEMM, sizes, dtype, device)
    weight = codes_below((n, k // 2), 256, hard, generator).to(torch.uint8).to(device)
    values = uniform((n, k // NVFP4_GROUP), 0.125, 0.375, generator)
    if hard == "far_scales":
        values.view(-1)[::2] *= _FAR
    scales = values.to(torch.float8_e4m3fn).view(torch.uint8)
    if hard == "every_code":
        every = codes_below(tuple(values.shape), 256, hard, generator)
        scales = torch.where(every & 127 == 127, 0, every).to(torch.uint8)
        scales[0, -1] = 0x7F  # NaN, of one output only: it would hide what the row does with others
    largest = 448.0 if hard == "every_code" else 0.25
    quantised: dict[str, torch.Tensor | None] = {
        "weight": place_bytes(NVFP4_GEMM, "weight", sizes, dtype, weight),
        "scales": place_bytes(NVFP4_GEMM, "scales", sizes, dtype, scales.to(device)).view(torch.float8_e4m3fn),
        "global_scales": stage.place("global_scales", uniform((n,), 0.2, 0.6, generator) / largest / math.sqrt(k)),
    }
    return product_case(stage, sizes, generator, hard, reference.nvfp4_gemm, quantised)


def _mxfp4_gemm(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    n, k = sizes["n"], sizes["k"]
    stage = Stage(MXFP4_GEMM, sizes, dtype, device)
    weight = codes_below((n, k // 2), 256, hard, generator).to(torch.uint8).to(device)
    middle = 125 - round(math.log2(k) / 2)
    if hard == "every_code":  # every exponent below, too, down to what is subnormal in fp32
        scales = codes_below((n, k // MXFP4_GROUP), middle + 1, hard, generator)
        scales[0, -1] = 255
    else:
        scales = codes_below((n, k // MXFP4_GROUP), 4, hard, generator) + middle - 2
    if hard == "far_scales":
        scales.view(-1)[::2] += 10
    quantised: dict[str, torch.Tensor | None] = {
        "weight": place_bytes(MXFP4_GEMM, "weight", sizes, dtype, weight),
        "scales": place_bytes(MXFP4_GEMM, "scales", sizes, dtype, scales.to(torch.uint8).to(device)),
    }
    return product_case(stage, sizes, generator, hard, reference.mxfp4_gemm, quantised)


def _quantize_nvfp4(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    tokens, k = sizes["num_tokens"], sizes["k"]
    stage = Stage(QUANTIZE_NVFP4, sizes, dtype, device)
    shape = (tokens, k)
    values = spikes(shape, generator) if hard == "large_magnitude" else torch.randn(shape, generator=generator)
    global_scale = float(uniform((1,), 0.5, 1.5, generator)) * (20.0 if hard == "large_magnitude" else 0.01)
    if hard == "zero_groups":
        values.view(-1, NVFP4_GROUP)[::2] = 0
        values.view(-1, NVFP4_GROUP)[::4] = -0.0
    elif hard == "tiny":  # some of them subnormal; zero in fp16
        values *= torch.exp2(-torch.randint(90, 140, shape, generator=generator).double()).float()
        global_scale = 2.0**-100
    elif hard == "not_finite":
        chosen = torch.randint(0, 200, shape, generator=generator)
        for place, value in enumerate((math.nan, math.inf, -math.inf, 6e4)):
            values[chosen == place] = value
    elif hard == "ties":  # quarters up to 6 beside a 6, by scales of powers of two: halfway between codes, and at them
        values = torch.randint(-24, 25, shape, generator=generator) / 4
        values.view(-1, NVFP4_GROUP)[:, 5] = 6
        values *= torch.exp2(torch.randint(-3, 4, (tokens, 1), generator=generator).float())
        global_scale = 0.25
    x = stage.place("x", values)
    scale = stage.place("global_scale", torch.tensor([global_scale]))
    out, around_out = _unwritten_bytes("out", sizes, dtype, (tokens, k // 2), device)
    scales, around_scales = _unwritten_bytes("scales", sizes, dtype, (tokens, k // NVFP4_GROUP), device)
    expected, expected_scales = reference.quantize_nvfp4(x, scale)
    checks = [
        Check("out", lambda: out, expected, 0.0, 0.0),
        Check("scales", lambda: scales, expected_scales.view(torch.uint8), 0.0, 0.0),
        around_out,
        around_scales,
    ]
    arguments = {"x": x, "global_scale": scale, "out": out, "scales": scales.view(torch.float8_e4m3fn)}
    return Case(hard or "random", arguments, checks)


def _unwritten_bytes(
    name: str, sizes: Sizes, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, Check]:
    """An output of bytes before the call, and the check that nothing around it changed."""
    before = torch.full(shape, _FILLER, dtype=torch.uint8, device=device)
    placed = place_bytes(QUANTIZE_NVFP4, name, sizes, dtype, before)
    whole = placed.as_strided((placed.untyped_storage().nbytes(),), (1,), 0)
    around = torch.ones(whole.shape, dtype=torch.bool, device=device)
    around.as_strided(placed.shape, placed.stride(), placed.storage_offset()).fill_(False)
    expected = torch.ones(int(around.sum()), dtype=torch.int64)
    return placed, Check(f"around {name}", lambda: (whole[around] == _FILLER).long(), expected, 0.0, 0.0)


CASES: dict[str, CaseMaker] = {"nvfp4_gemm": _nvfp4_gemm, "mxfp4_gemm": _mxfp4_gemm, "quantize_nvfp4": _quantize_nvfp4}
