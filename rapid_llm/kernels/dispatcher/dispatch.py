"""``dispatch``: the function that serves an op. A layer asks once, when it is built, and keeps the answer."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rapid_llm.envs import environment
from rapid_llm.errors import ConfigError, NoKernelError
from rapid_llm.kernels.device import DeviceInfo
from rapid_llm.kernels.dispatcher import catalog as catalogs
from rapid_llm.kernels.dispatcher.evidence import evidence_for, load_records
from rapid_llm.kernels.dispatcher.ranking import Question, Ranking, Verdict, best_first, measured_us, rank
from rapid_llm.kernels.ops.interfaces import KernelSpec, Phase
from rapid_llm.kernels.provenance import triton_minor

_Items = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Choice:
    """The answer to a question.

    Attributes:
        chosen: the row that serves, None when none may.
        ranking: every row's verdict.
        override: whether RAPID_KERNELS made the choice.
    """

    chosen: Verdict | None
    ranking: Ranking
    override: bool = False


def dispatch(op: str, phase: Phase | None = None, /, *, device: DeviceInfo, dtype: str, **sizes: int) -> Callable[..., Any]:
    """The function of the row that serves ``op`` here; its module is imported on first use.

    Args:
        op: an op of the catalog.
        phase: rows to serve; None is all that the op's contract has.
        device: this machine's device that the function will run on.
        dtype: compute dtype, as torch names it.
        sizes: sizes that will not change, by the names of the contract. A size left out may take any value.
    Raises: NoKernelError with every row and all its reasons when none serves; ConfigError on an unknown op, dtype or size, and
        when RAPID_KERNELS names a row that is unknown or may not serve.
    """
    return load_target(choose(op, phase, device=device, dtype=dtype, **sizes))


def choose(op: str, phase: Phase | None = None, /, *, device: DeviceInfo, dtype: str, **sizes: int) -> KernelSpec:
    """The row whose function ``dispatch`` returns; arguments and errors as there. Imports no kernel module."""
    overrides = tuple(sorted(environment().kernels.items()))
    return _choose(op, phase, device, dtype, tuple(sorted(sizes.items())), overrides, False)


def choose_without_libraries(op: str, /, *, device: DeviceInfo, dtype: str, **sizes: int) -> KernelSpec:
    """As ``choose``, leaving out rows that call a library, whose sums may change with the batch."""
    overrides = tuple(sorted(environment().kernels.items()))
    return _choose(op, None, device, dtype, tuple(sorted(sizes.items())), overrides, True)


@lru_cache(maxsize=4096)
def _choose(
    op: str, phase: Phase | None, device: DeviceInfo, dtype: str, sizes: _Items, overrides: _Items, batch_invariant: bool
) -> KernelSpec:
    return _served(Question(op, device, dtype, dict(sizes), phase, batch_invariant=batch_invariant), overrides)[0]


def _served(question: Question, overrides: _Items) -> tuple[KernelSpec, Choice]:
    """The row that serves, and the answer it stands in. Raises: NoKernelError when none does."""
    choice = answer(question, dict(overrides))
    if choice.chosen is None:
        raise _no_kernel(question, choice.ranking)
    return choice.chosen.row, choice


Pieces = tuple[tuple[int, KernelSpec], ...]
"""Rows by size, smallest first: (largest value that the row serves, row)."""


def choose_by_size(op: str, /, *, device: DeviceInfo, dtype: str, **sizes: int) -> Pieces:
    """As ``choose``, for calls whose free size (``Contract.free``) varies: in each bucket of it the row ranked first there.

    Where nothing is measured, or there is nothing to choose between, one row serves all.
    """
    overrides = tuple(sorted(environment().kernels.items()))
    return _choose_by_size(op, device, dtype, tuple(sorted(sizes.items())), overrides)


@lru_cache(maxsize=4096)
def _choose_by_size(op: str, device: DeviceInfo, dtype: str, sizes: _Items, overrides: _Items) -> Pieces:
    contract = catalogs.catalog().contract(op)
    most = int(contract.maxima.get(contract.free, 0))
    row, usual = _served(Question(op, device, dtype, dict(sizes), None), overrides)
    natives = [verdict for verdict in usual.ranking.eligible if not verdict.row.fallback]
    alone = ((most, row),)
    if not contract.free or contract.free in dict(sizes) or usual.override or len(natives) < 2:
        return alone
    pieces: list[tuple[int, KernelSpec]] = []
    for exponent in range(most.bit_length()):
        bucket = {**contract.defaults, **dict(sizes), contract.free: 1 << exponent}
        there = [replace(each, latency_us=measured_us(each.evidence, contract, dtype, bucket)) for each in natives]
        known = any(each.latency_us is not None for each in there)
        if not known and not pieces:
            continue  # the first bucket that is known serves those below it too
        row = best_first(there)[0].row if known else pieces[-1][1]
        if pieces and pieces[-1][1] is row:
            pieces.pop()
        pieces.append((1 << exponent, row))
    return tuple(pieces) or alone


def forget_choices() -> None:
    """Drop the cached answers; call it after evidence was written in this process."""
    _choose.cache_clear()
    _choose_by_size.cache_clear()


def answer(question: Question, overrides: Mapping[str, str]) -> Choice:
    """The row that serves, by rank or by override, and every row's verdict. Raises: ConfigError as ``dispatch`` does."""
    catalog = catalogs.catalog()
    for op, name in overrides.items():  # all of them: a misspelt op would otherwise never be noticed
        _overridden(catalog, op, name)
    ranking = rank(question, catalog, load_records())
    wanted = overrides.get(question.op)
    if wanted is None:
        return Choice(ranking.eligible[0] if ranking.eligible else None, ranking)
    for verdict in ranking.eligible:
        if verdict.row.name == wanted:
            return Choice(verdict, ranking, override=True)
    refused = next(verdict for verdict in ranking.rejected if verdict.row.name == wanted)
    raise ConfigError(
        f"RAPID_KERNELS asks for {wanted}, which may not serve {question.op} on {question.device.name} in {question.dtype}",
        got="; ".join(refused.reasons),
        wanted=" or ".join(verdict.row.name for verdict in ranking.eligible) or "a row that may serve, there is none",
        change="name another row or unset RAPID_KERNELS",
    )


def _overridden(catalog: catalogs.Catalog, op: str, name: str) -> KernelSpec:
    try:
        return catalog.row(op, name)
    except ConfigError as error:
        change = "correct RAPID_KERNELS or unset it"
        raise ConfigError(f"RAPID_KERNELS: {error.problem}", got=error.got, wanted=error.wanted, change=change) from None


def _no_kernel(question: Question, ranking: Ranking) -> NoKernelError:
    shape = ", ".join(f"{name}={value}" for name, value in question.sizes.items()) or "any shape"
    rows = [f"\n  {verdict.row.name}: {'; '.join(verdict.reasons)}" for verdict in ranking.rejected]
    return NoKernelError(
        f"no row serves {question.op} on {question.device.name} ({question.dtype}, {shape}){''.join(rows) or ': it has no rows'}",
        change=f"\nsee 'rapid-llm kernels explain {question.op} --device {question.device.name}'",
    )


def load_target(row: KernelSpec) -> Callable[..., Any]:
    """Import a row's module and return its function. Raises: ConfigError when the module has no such function."""
    module, _, name = row.target.partition(":")
    return _load(row, module, name)


def load_prepare(row: KernelSpec) -> Callable[..., Any] | None:
    """The function that ``row.prepare`` names, from the module of its target; None where it names none. Errors as load_target."""
    return _load(row, row.target.partition(":")[0], row.prepare) if row.prepare else None


def _load(row: KernelSpec, module: str, name: str) -> Callable[..., Any]:
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        wanted = f"{name!r} in {module}"
        raise ConfigError(f"row {row.name!r} has no function", got=row.target, wanted=wanted, change="correct its target")
    return function  # type: ignore[no-any-return]


def verified_elsewhere_summary(device: DeviceInfo) -> str | None:
    """The start-up line on rows of this machine's ``device`` that serve on runs made on another; None when there are none."""
    records = load_records()
    triton = triton_minor()
    found = [
        evidence.record
        for row in catalogs.catalog().all_rows()
        if not row.fallback
        for evidence in (evidence_for(row, device, triton=triton, here=True, records=records),)
        if evidence.state == "verified_elsewhere" and evidence.record is not None
    ]
    if not found:
        return None
    rows = "1 kernel row serves" if len(found) == 1 else f"{len(found)} kernel rows serve"
    seconds = sum(record.seconds for record in found)
    about = f" (about {max(round(seconds), 1)} s)" if seconds else ""
    others = ", ".join(sorted({record.device for record in found}))
    return f"{rows} on {device.name} by runs made on {others}; 'rapid-llm kernels verify' verifies here{about}"


def fallback_summary(questions: Iterable[Question]) -> str | None:
    """The start-up line on ops that plain torch serves on a GPU, with the reasons; None when there are none.

    Args:
        questions: what the layers of a model asked, all of one device. Of several on one op the first that plain torch serves
            is told.
    """
    found: dict[str, str] = {}
    device = ""
    for question in questions:
        if question.device.type == "cpu" or question.op in found:
            continue
        choice = answer(question, environment().kernels)
        if choice.chosen is not None and choice.chosen.row.fallback:
            why = "; ".join(f"{verdict.row.name}: {', '.join(verdict.reasons)}" for verdict in choice.ranking.rejected)
            found[question.op], device = f"{question.op} ({why or 'no other row'})", question.device.name
    if not found:
        return None
    serve = "1 op is" if len(found) == 1 else f"{len(found)} ops are"
    return f"{serve} served by plain torch on {device}, slower than a native row: {', '.join(found[op] for op in sorted(found))}"
