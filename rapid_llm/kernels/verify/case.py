"""A case of a verify run: arguments for a row, and what must be true after the call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rapid_llm.kernels.ops.interfaces import Sizes


@dataclass(frozen=True)
class Check:
    """One tensor that the call leaves behind, against what it must hold.

    Attributes:
        name: the tensor, for messages.
        actual: reads it after the call.
        expected: the reference: float64, compared within the tolerance, or integer, compared exactly.
        rtol, atol: |actual - expected| <= atol + rtol * |expected|; equal infinities and NaNs agree.
    """

    name: str
    actual: Callable[[], torch.Tensor]
    expected: torch.Tensor
    rtol: float
    atol: float


@dataclass(frozen=True)
class Case:
    """A row is called as ``row(**arguments)``, then every check must hold. ``id`` tells the case from its op's others."""

    id: str
    arguments: dict[str, Any]
    checks: list[Check]


CaseMaker = Callable[[Sizes, torch.dtype, torch.device, torch.Generator, str | None], Case]
"""Makes the case of given sizes, dtype and device from a CPU generator; the last argument names a hard input or is None."""


@dataclass(frozen=True)
class Comparison:
    """How far a check is off.

    Attributes:
        max_abs, max_rel: largest errors over elements with a finite reference (relative ones where it is not 0).
        problem: what is wrong, empty when the check holds.
    """

    max_abs: float
    max_rel: float
    problem: str = ""


def compare(check: Check) -> Comparison:
    """Read the tensor and measure it against the reference, on the CPU in float64."""
    actual, expected = check.actual().detach().cpu(), check.expected.detach().cpu()
    if actual.shape != expected.shape:
        return Comparison(0.0, 0.0, f"{check.name} has shape {list(actual.shape)}, wanted {list(expected.shape)}")
    if not expected.is_floating_point():
        return _compare_exactly(check.name, actual, expected)
    actual, expected = actual.double(), expected.double()
    finite = expected.isfinite() & actual.isfinite()
    error = torch.where(finite, (actual - expected).abs(), torch.zeros_like(expected))
    relative = torch.where(finite & (expected != 0), error / expected.abs(), torch.zeros_like(expected))
    max_abs, max_rel = (float(values.max()) if values.numel() else 0.0 for values in (error, relative))
    close = torch.isclose(actual, expected, rtol=check.rtol, atol=check.atol, equal_nan=True)
    if bool(close.all()):
        return Comparison(max_abs, max_rel)
    wrong = int((~close).sum())
    problem = f"{check.name}: {wrong} of {close.numel()} elements off, {_first_wrong(close, actual, expected)}"
    return Comparison(max_abs, max_rel, f"{problem}, largest error {max_abs:.3g} (rtol {check.rtol:g}, atol {check.atol:g})")


def _compare_exactly(name: str, actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    if actual.is_floating_point():
        return Comparison(0.0, 0.0, f"{name} is {actual.dtype}, wanted integers")
    equal = actual.long() == expected.long()
    if bool(equal.all()):
        return Comparison(0.0, 0.0)
    error = float((actual.long() - expected.long()).abs().max())
    wrong = int((~equal).sum())
    return Comparison(error, 0.0, f"{name}: {wrong} of {equal.numel()} differ, {_first_wrong(equal, actual, expected)}")


def _first_wrong(agrees: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    position = tuple(int(index) for index in (~agrees).nonzero()[0])
    return f"first at {list(position)}: {actual[position].item():.6g} for {expected[position].item():.6g}"
