"""Cases of the fused family."""

import math

import torch

from rapid_llm.kernels.ops.fused.rows import ADD_RMS_NORM_FP8, SWIGLU_FP8
from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.reference import fused as reference
from rapid_llm.kernels.verify.buffers import Stage, spikes, uniform
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check

_EPS = 1e-5
_FP32 = 1e-5
"""What fp32 maths may be off before the rounding: exp, rsqrt and divisions as GPUs have them, sums of up to 20,480 squares."""


def _activations(sizes: Sizes, generator: torch.Generator, hard: str | None) -> torch.Tensor:
    shape = (sizes["num_tokens"], sizes["d"])
    values = spikes(shape, generator) if hard == "large_magnitude" else 2 * torch.randn(shape, generator=generator)
    if hard == "zero_rows":
        values[::2] = 0.0
    elif hard == "not_finite" and shape[0]:
        values[::3, 5], values[1::3, ::7], values[1::3, 2::7] = math.nan, math.inf, -math.inf
    return values


def _add_rms_norm_fp8(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None
) -> Case:
    shape = (sizes["num_tokens"], sizes["d"])
    stage = Stage(ADD_RMS_NORM_FP8, sizes, dtype, device)
    x = stage.place("x", _activations(sizes, generator, hard))
    others = torch.randn(shape, generator=generator)
    if hard == "zero_rows":
        others[::2] = 0.0
    residual = stage.place("residual", others)
    weight = stage.place("weight", torch.randn(sizes["d"], generator=generator))
    new_residual, numbers, expected = reference.add_rms_norm_fp8(x, residual, weight, eps=_EPS, group=sizes["group"])
    arguments = {"x": x, "residual": residual, "weight": weight, "eps": _EPS}
    return _case(stage, arguments, numbers, expected, hard, [Check("residual", lambda: residual, new_residual, 0.0, 0.0)])


def _swiglu_fp8(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    stage = Stage(SWIGLU_FP8, sizes, dtype, device)
    up = uniform((sizes["num_tokens"], sizes["d"]), -2.0, 2.0, generator)
    gate_up = stage.place("gate_up", torch.cat([_activations(sizes, generator, hard), up], dim=1))
    return _case(stage, {"gate_up": gate_up}, *reference.swiglu_fp8(gate_up, group=sizes["group"]), hard, [])


def _case(
    stage: Stage,
    arguments: dict[str, object],
    numbers: torch.Tensor,
    expected: torch.Tensor,
    hard: str | None,
    checks: list[Check],
) -> Case:
    """That ``numbers``, in units of their scales, come out within half a step of e4m3: 2**-4 of a number, or 2**-10."""
    out, scales = stage.unwritten("out", numbers.shape), stage.unwritten("scales", expected.shape)
    if expected.shape[1] == 1 and expected.shape[0] % 2:
        scales, expected = scales[:, 0], expected[:, 0]
    checks = [
        *checks,
        Check("out", lambda: out.float(), numbers, 2.0**-4 + 2 * _FP32, 2.0**-10 + 2 * _FP32),
        Check("scales", lambda: scales, expected, _FP32, 0.0),
    ]
    return Case(hard or "random", {**arguments, "out": out, "scales": scales}, [*checks, *stage.guards()])


CASES: dict[str, CaseMaker] = {"add_rms_norm_fp8": _add_rms_norm_fp8, "swiglu_fp8": _swiglu_fp8}
