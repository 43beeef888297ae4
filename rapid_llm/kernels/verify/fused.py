"""Cases of the fused family."""

import math
from typing import Any

import torch

from rapid_llm.kernels.ops.fused.rows import ADD_RMS_NORM_FP8, QK_NORM_ROPE_KV_WRITE, ROPE_KV_WRITE, SWIGLU_FP8
from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.reference import fused as reference
from rapid_llm.kernels.verify.buffers import Stage, angle_table, once_rounded, scattered_slots, spikes, uniform
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check

_EPS = 1e-5
_MAX_POSITIONS = 211
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


def _rope_kv_write(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    stage = Stage(ROPE_KV_WRITE, sizes, dtype, device)
    arguments = _heads_and_places(stage, sizes, generator, hard)
    expected = reference.rope_kv_write(**arguments)
    # Two products may cancel, so the error is that of the largest term.
    return _kv_case(stage, arguments, expected, 2e4 if hard == "large_magnitude" else 10.0, hard)


def _qk_norm_rope_kv_write(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None
) -> Case:
    stage = Stage(QK_NORM_ROPE_KV_WRITE, sizes, dtype, device)
    arguments = _heads_and_places(stage, sizes, generator, hard) | {"eps": _EPS}
    for name in ("q_weight", "k_weight"):
        arguments[name] = stage.place(name, torch.randn(sizes["head_dim"], generator=generator))
    # A head that is one spike has entries up to the root of its width, times a weight of a few.
    return _kv_case(stage, arguments, reference.qk_norm_rope_kv_write(**arguments), 4 * sizes["head_dim"] ** 0.5, hard)


def _heads_and_places(stage: Stage, sizes: Sizes, generator: torch.Generator, hard: str | None) -> dict[str, Any]:
    """q, k and v of tokens, their angles, their slots in no order, and pools."""
    num_tokens, num_rows, head_dim = sizes["num_tokens"], sizes["num_rows"], sizes["head_dim"]

    def heads(count: int) -> torch.Tensor:
        shape = (num_tokens, count, head_dim)
        return spikes(shape, generator) if hard == "large_magnitude" else torch.randn(shape, generator=generator)

    slots = scattered_slots(num_tokens, num_rows, generator, hard)
    k_pool, v_pool = stage.place_pools(*torch.randn(2, num_rows, sizes["num_kv_heads"], head_dim, generator=generator))
    return {
        "q": stage.place("q", heads(sizes["num_heads"])),
        "k": stage.place("k", heads(sizes["num_kv_heads"])),
        "v": stage.place("v", heads(sizes["num_kv_heads"])),
        "positions": stage.place("positions", torch.randint(0, _MAX_POSITIONS, (num_tokens,), generator=generator)),
        "cos_sin": stage.place("cos_sin", angle_table(head_dim, _MAX_POSITIONS)),
        "slot_mapping": stage.place("slot_mapping", slots),
        "k_pool": k_pool,
        "v_pool": v_pool,
    }


def _kv_case(
    stage: Stage,
    arguments: dict[str, Any],
    expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    terms: float,
    hard: str | None,
) -> Case:
    """q and K rounded once, with ``terms`` as large as that before; V copied, and every row that no token is for as it was."""
    rtol, atol = once_rounded(arguments["q"].dtype, terms=terms)
    new_q, new_k, new_v = expected
    untouched = torch.ones(len(new_k), dtype=torch.bool, device=new_k.device)
    slots = arguments["slot_mapping"].long()
    untouched[slots[(slots >= 0) & (slots < len(new_k))]] = False
    checks = [
        Check("q", lambda: arguments["q"], new_q, rtol, atol),
        Check("k_pool", lambda: arguments["k_pool"], new_k, rtol, atol),
        Check("k_pool elsewhere", lambda: arguments["k_pool"][untouched], new_k[untouched], 0.0, 0.0),
        Check("v_pool", lambda: arguments["v_pool"], new_v, 0.0, 0.0),
    ]
    return Case(hard or "random", arguments, [*checks, *stage.guards()])


CASES: dict[str, CaseMaker] = {
    "add_rms_norm_fp8": _add_rms_norm_fp8,
    "swiglu_fp8": _swiglu_fp8,
    "rope_kv_write": _rope_kv_write,
    "qk_norm_rope_kv_write": _qk_norm_rope_kv_write,
}
