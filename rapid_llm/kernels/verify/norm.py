"""Cases of the norm family."""

import torch

from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.ops.norm.rows import ADD_RMS_NORM, RMS_NORM
from rapid_llm.kernels.reference import norm as reference
from rapid_llm.kernels.verify.buffers import Stage, once_rounded, spikes
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check

_EPS = 1e-5


def _activations(sizes: Sizes, generator: torch.Generator, hard: str | None) -> torch.Tensor:
    shape = (sizes["num_tokens"], sizes["d"])
    values = spikes(shape, generator) if hard == "large_magnitude" else torch.randn(shape, generator=generator)
    if hard == "zero_rows":
        values[::2] = 0.0
    return values


def _rms_norm(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    stage = Stage(RMS_NORM, sizes, dtype, device)
    values = _activations(sizes, generator, hard)
    num_tokens, d = values.shape
    if num_tokens and num_tokens % 3 == 0:
        values = values.view(-1, 3, d)  # the norm of q or k heads
    in_place = num_tokens % 5 == 2
    x = stage.place("x", values, written=in_place)
    weight = stage.place("weight", torch.randn(d, generator=generator))
    expected = reference.rms_norm(x, weight, eps=_EPS)
    out = x if in_place else stage.unwritten("out", values.shape)
    check = Check("out", lambda: out, expected, *once_rounded(dtype))
    arguments = {"x": x, "weight": weight, "out": out, "eps": _EPS}
    return Case(hard or "random", arguments, [check, *stage.guards()])


def _add_rms_norm(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    stage = Stage(ADD_RMS_NORM, sizes, dtype, device)
    values, others = _activations(sizes, generator, hard), torch.randn(sizes["num_tokens"], sizes["d"], generator=generator)
    if hard == "zero_rows":
        others[::2] = 0.0
    in_place = sizes["num_tokens"] % 5 == 2
    x = stage.place("x", values, written=in_place)
    residual = stage.place("residual", others)
    weight = stage.place("weight", torch.randn(sizes["d"], generator=generator))
    expected_residual, expected = reference.add_rms_norm(x, residual, weight, eps=_EPS)
    out = x if in_place else stage.unwritten("out", values.shape)
    rtol, atol = once_rounded(dtype)
    checks = [
        Check("residual", lambda: residual, expected_residual, rtol, atol),
        Check("out", lambda: out, expected, 2 * rtol, 2 * atol),  # rounded twice: in the residual and in out
    ]
    arguments = {"x": x, "residual": residual, "weight": weight, "out": out, "eps": _EPS}
    return Case(hard or "random", arguments, [*checks, *stage.guards()])


CASES: dict[str, CaseMaker] = {"rms_norm": _rms_norm, "add_rms_norm": _add_rms_norm}
