"""Runs rows over their contract's sweep against the reference, and keeps the runs as evidence in the user's store."""

import importlib
import subprocess
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rapid_llm.envs import environment
from rapid_llm.errors import ConfigError, RapidError
from rapid_llm.kernels.device import DeviceInfo, current_device
from rapid_llm.kernels.dispatcher import catalog as catalogs
from rapid_llm.kernels.dispatcher.dispatch import forget_choices, load_target
from rapid_llm.kernels.dispatcher.evidence import EvidenceRecord, record_run
from rapid_llm.kernels.dispatcher.ranking import missing_packages
from rapid_llm.kernels.ops.interfaces import Contract, KernelSpec, Sizes
from rapid_llm.kernels.provenance import source_hash, toolchain
from rapid_llm.kernels.verify.case import Case, CaseMaker, compare

_SEED = 20_261_129


@dataclass(frozen=True)
class Failure:
    """One case that did not hold: its id, what was wrong, its largest absolute error.

    ``fatal`` is a fault of the device, after which nothing more runs in this process.
    """

    case: str
    problem: str
    max_abs: float = 0.0
    fatal: bool = False


@dataclass(frozen=True)
class VerifyResult:
    """One row's run.

    Attributes:
        op, row, device: what ran, where.
        cases: ids of the cases that ran.
        failures: those that did not hold.
        errors: largest errors by dtype: {"bfloat16": {"max_abs": x, "max_rel": y}}.
        skipped: why the row cannot run here; it then ran no case and left no record.
        seconds: how long it took.
    """

    op: str
    row: str
    device: str
    cases: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether it ran and every case held."""
        return bool(self.cases) and not self.failures


def verify(ops: Sequence[str] | None, device: DeviceInfo) -> list[VerifyResult]:
    """Run every row of ``ops`` (None: of all) that this machine's ``device`` can launch, and keep each run as evidence.

    A row that passes is verified here from now on. A row that fails loses its older evidence of the same source and is out
    of service on this device.

    Raises: ConfigError on an unknown op, an op without cases, a device of another machine, a store that cannot be
        written.
    """
    if device != current_device(device.type):
        here = current_device(device.type).name
        raise ConfigError("rows are verified where they run", got=device.name, wanted=here, change="run it on that machine")
    catalog = catalogs.catalog()
    makers = {op: case_maker(catalog, op) for op in (catalog.contracts if ops is None else ops)}
    results: list[VerifyResult] = []
    lost = ""
    for op, maker in makers.items():
        for row in catalog.rows[op]:
            if lost:
                results.append(
                    VerifyResult(op, row.name, device.name, skipped=(f"the device is lost since {lost} failed: run again",))
                )
                continue
            result = run_row(row, catalog.contract(op), maker, device)
            lost = row.name if any(failure.fatal for failure in result.failures) else ""
            if result.cases:
                record_run(_record(row, result))
            results.append(result)
    forget_choices()
    return results


def case_maker(catalog: catalogs.Catalog, op: str) -> CaseMaker:
    """The case maker of an op, from ``verify/<family>.py``. Raises: ConfigError when the op is unknown or has none."""
    catalog.contract(op)
    module = f"{__package__}.{catalog.families[op]}"
    cases: dict[str, CaseMaker] = importlib.import_module(module).CASES
    if op not in cases:
        raise ConfigError(
            f"{op} has no verify cases", got=", ".join(sorted(cases)) or "none", wanted=op, change=f"add it to {module}"
        )
    return cases[op]


def run_row(row: KernelSpec, contract: Contract, maker: CaseMaker, device: DeviceInfo) -> VerifyResult:
    """Run one row over everything its contract sweeps and its limits allow. Writes nothing."""
    skipped = (*row.requires.unmet(device), *missing_packages(row))
    if skipped:
        return VerifyResult(row.op, row.name, device.name, skipped=skipped)
    started = time.perf_counter()
    cases: list[str] = []
    failures: list[Failure] = []
    errors: dict[str, dict[str, float]] = {}
    for dtype, sizes, hard in _plan(row, contract):
        label = _label(dtype, sizes, hard)
        failure, measured = _run_case(row, maker, device, label, (dtype, sizes, hard))
        cases.append(label)
        failures.extend([failure] if failure else [])
        if failure and failure.fatal:
            break
        worst = errors.setdefault(dtype, {"max_abs": 0.0, "max_rel": 0.0})
        errors[dtype] = {name: max(worst[name], measured[name]) for name in worst}
    seconds = round(time.perf_counter() - started, 3)
    return VerifyResult(row.op, row.name, device.name, tuple(cases), tuple(failures), errors, seconds=seconds)


_Point = tuple[str, Sizes, str | None]


def _plan(row: KernelSpec, contract: Contract) -> Iterator[_Point]:
    """Dtype, sizes and hard input of every case, in a fixed order."""
    for dtype in (dtype for dtype in contract.dtypes if dtype in row.dtypes):
        for sizes in contract.sweep:
            if row.allows(sizes):
                for hard in (None, *contract.hard):
                    yield dtype, sizes, hard


def _label(dtype: str, sizes: Sizes, hard: str | None) -> str:
    shape = ",".join(f"{name}={value}" for name, value in sizes.items())
    return "-".join((dtype, shape, *([hard] if hard else [])))


def _run_case(
    row: KernelSpec, maker: CaseMaker, device: DeviceInfo, label: str, point: _Point
) -> tuple[Failure | None, dict[str, float]]:
    dtype, sizes, hard = point
    generator = torch.Generator().manual_seed(_SEED + zlib.crc32(f"{row.op}-{label}".encode()))
    case = maker(sizes, getattr(torch, dtype), torch.device(device.type), generator, hard)
    none = {"max_abs": 0.0, "max_rel": 0.0}
    try:
        load_target(row)(**case.arguments)
        if device.type == "cuda":
            torch.cuda.synchronize()  # a fault belongs to the case that caused it
    except _failures_of(row) as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Failure(label, problem, fatal=isinstance(error, torch.AcceleratorError)), none
    return _compare_all(case, label)


def _compare_all(case: Case, label: str) -> tuple[Failure | None, dict[str, float]]:
    comparisons = [compare(check) for check in case.checks]
    measured = {
        "max_abs": max((result.max_abs for result in comparisons), default=0.0),
        "max_rel": max((result.max_rel for result in comparisons), default=0.0),
    }
    problems = [result.problem for result in comparisons if result.problem]
    return (Failure(label, "; ".join(problems), measured["max_abs"]) if problems else None), measured


def _failures_of(row: KernelSpec) -> tuple[type[Exception], ...]:
    """What a broken row raises: our refusals, torch's errors and, for a Triton row, its compiler's."""
    triton = [importlib.import_module("triton.errors").TritonError] if "triton" in row.requires.packages else []
    return (RapidError, RuntimeError, ValueError, TypeError, LookupError, *triton)


def _record(row: KernelSpec, result: VerifyResult) -> EvidenceRecord:
    first = f"{result.failures[0].case}: {result.failures[0].problem}" if result.failures else ""
    cases: dict[str, Any] = {"count": len(result.cases), "ids": list(result.cases)}
    return EvidenceRecord(
        row=row.name,
        op=row.op,
        source_hash=source_hash(row.target),
        device=result.device,
        toolchain=toolchain(),
        cases=cases,
        errors=result.errors,
        command=f"rapid-llm kernels verify --op {row.op}",
        commit=_commit(),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        seconds=result.seconds,
        failure=first,
    )


def _commit() -> str:
    """The commit of the source tree: what RAPID_COMMIT says, as for an installed package, else what git says."""
    tree = Path(__file__).parents[3]
    if environment().commit or not (tree / ".git").exists():
        return environment().commit
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
