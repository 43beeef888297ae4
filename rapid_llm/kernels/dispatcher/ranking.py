"""Which rows may serve a question, in what order, and why each of the others does not.

Fallback rows come last, whatever their priority. Before them come rows with a latency measured on this device for this shape
bucket, fastest first, then the rest by priority and name: a measured row has shown what it does here, the others promise. Rows
that are slower than the fastest by no more than measuring is off by count as fast as it; of them one that calls a library is the
last, since a library's launch does not begin while the kernel before it ends, and the others go by priority.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rapid_llm.envs import nearest
from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import DeviceInfo
from rapid_llm.kernels.dispatcher.catalog import Catalog, size_names
from rapid_llm.kernels.dispatcher.evidence import Evidence, EvidenceRecord, evidence_for, latency_key
from rapid_llm.kernels.ops.interfaces import Contract, KernelSpec, Limit, Phase, Sizes
from rapid_llm.kernels.provenance import is_installed, triton_minor

# What a dtype may be called at all; which of them an op serves is its contract's affair.
DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int8", "uint8")


@dataclass(frozen=True)
class Question:
    """What is asked of the catalog.

    Attributes:
        op, device, dtype: which op, where, in which compute dtype.
        sizes: sizes that are fixed. One that is left out may take any value up to the contract's maximum.
        phase: rows to serve; None is all that the contract has.
        here: whether the device is this machine's, so that its packages and its Triton are the installed ones.
        batch_invariant: leave out rows that call a library, whose sums may change with the number of rows.
    """

    op: str
    device: DeviceInfo
    dtype: str
    sizes: Sizes
    phase: Phase | None = None
    here: bool = True
    batch_invariant: bool = False


@dataclass(frozen=True)
class Verdict:
    """One row's answer to a question. It is eligible when ``reasons`` is empty."""

    row: KernelSpec
    evidence: Evidence
    reasons: tuple[str, ...] = ()
    latency_us: float | None = None


@dataclass(frozen=True)
class Ranking:
    """All rows of an op: the eligible ones best first, and the others with every reason against each."""

    eligible: tuple[Verdict, ...]
    rejected: tuple[Verdict, ...] = field(default=())


def rank(question: Question, catalog: Catalog, records: Iterable[EvidenceRecord]) -> Ranking:
    """Judge and order every row of the question's op.

    Raises: ConfigError on an unknown op, dtype, size or phase; never for the lack of a row.
    """
    contract = catalog.contract(question.op)
    check_question(question, contract)
    records = tuple(records)
    verdicts = [_judge(row, question, contract, records) for row in catalog.rows[question.op]]
    eligible = best_first(verdict for verdict in verdicts if not verdict.reasons)
    return Ranking(tuple(eligible), tuple(verdict for verdict in verdicts if verdict.reasons))


def best_first(eligible: Iterable[Verdict]) -> list[Verdict]:
    """Eligible rows in the order in which they serve."""
    verdicts = list(eligible)
    bound = _AS_FAST * _fastest_us(verdicts)
    return sorted(verdicts, key=lambda verdict: _order(verdict, bound))


def _fastest_us(verdicts: Iterable[Verdict]) -> float:
    """The least time among rows that are no fallbacks; infinite where none was measured."""
    times = (verdict.latency_us for verdict in verdicts if not verdict.row.fallback)
    return min((us for us in times if us is not None), default=math.inf)


def check_question(question: Question, contract: Contract) -> None:
    """Raises: ConfigError on a size, dtype or phase that the contract does not know."""
    known = size_names(contract)
    for name, value in question.sizes.items():
        if name not in known:
            wanted = nearest(name, known)
            raise ConfigError(f"unknown size of {contract.op}", got=name, wanted=wanted, change="correct its name")
        if value < 0:
            raise ConfigError(f"bad size of {contract.op}", got=f"{name}={value}", wanted="0 or more", change="correct it")
    if question.dtype not in DTYPES and question.dtype not in contract.dtypes:
        wanted = nearest(question.dtype, contract.dtypes)
        raise ConfigError("unknown dtype", got=repr(question.dtype), wanted=wanted, change="name it as torch does")
    if question.phase is not None and contract.phase not in ("both", question.phase):
        raise ConfigError(f"{contract.op} has no such phase", got=question.phase, wanted=contract.phase, change="ask for that")


def _judge(row: KernelSpec, question: Question, contract: Contract, records: tuple[EvidenceRecord, ...]) -> Verdict:
    triton = triton_minor() if question.here and "triton" in row.requires.packages else None
    evidence = evidence_for(row, question.device, triton=triton, here=question.here, records=records)
    reasons = [
        *row.requires.unmet(question.device),
        *(missing_packages(row) if question.here else ()),
        *_dtype_and_phase(row, question, contract),
        *_sizes(row, question.sizes, contract),
        *(["calls a library, whose sums may change with the batch"] if question.batch_invariant and row.library else []),
        *([f"unverified: {evidence.why_not}"] if evidence.why_not else []),
    ]
    return Verdict(
        row,
        evidence,
        tuple(reasons),
        measured_us(evidence, contract, question.dtype, {**contract.defaults, **question.sizes}),
    )


def missing_packages(row: KernelSpec) -> list[str]:
    """Every package of the row that is not installed here, and a Triton that it does not support; empty where it has all."""
    triton = triton_minor() if "triton" in row.requires.packages else None
    reasons = [f"package {package} is not installed" for package in row.requires.packages if not is_installed(package)]
    version = tuple(int(part) for part in triton.split(".")) if triton else None
    low, high = row.requires.min_triton, row.requires.max_triton
    if version and low and version < low:
        reasons.append(f"needs Triton {low[0]}.{low[1]} or later, {triton} is installed")
    if version and high and version > high:
        reasons.append(f"needs Triton {high[0]}.{high[1]} or earlier, {triton} is installed")
    return reasons


def _dtype_and_phase(row: KernelSpec, question: Question, contract: Contract) -> list[str]:
    reasons = []
    if question.dtype not in row.dtypes:
        reasons.append(f"serves {', '.join(row.dtypes)}, not {question.dtype}")
    asked = question.phase or contract.phase
    if row.phase not in ("both", asked):
        reasons.append(f"serves {row.phase} only, asked for {asked}")
    return reasons


def _sizes(row: KernelSpec, sizes: Sizes, contract: Contract) -> list[str]:
    reasons = []
    for name, limit in row.limits.items():
        if name in sizes and not limit.allows(sizes[name]):
            reasons.append(f"serves {name} {limit}, asked for {sizes[name]:,}")
        elif name not in sizes and not _allows_all(limit, contract.maxima.get(name, math.inf)):
            reasons.append(f"serves {name} {limit}, asked for any {name}")
    for name, value in sizes.items():
        if value > contract.maxima.get(name, math.inf):
            reasons.append(f"{name} {value:,} is past the contract's maximum of {contract.maxima[name]:,}")
    return reasons


def _allows_all(limit: Limit, maximum: float) -> bool:
    return limit.low <= 1 and limit.high >= maximum and limit.multiple == 1


_AS_FAST = 1.04
"""Of the fastest row's time. Medians of one row in two runs differ by up to 6 %, mostly by less than this."""
_NEAREST_BUCKETS = (0, -1, 1, -2, 2, -3, 3)  # of the free size, in powers of two; of two as near the smaller first


def measured_us(evidence: Evidence, contract: Contract, dtype: str, sizes: Sizes) -> float | None:
    """The latency that lies beside a row's evidence for a call of all these sizes; None unless the row is verified here.

    Where the bucket of the free size was not measured, that of the nearest bucket that was, within a factor of eight.
    """
    if evidence.state != "verified_here" or evidence.record is None:
        return None
    latencies, free = evidence.record.latencies_us, contract.free
    steps = _NEAREST_BUCKETS if free and sizes.get(free) else (0,)
    for step in steps:
        near = {**sizes, free: max(int(sizes[free] * 2.0**step), 1)} if step else sizes
        us = latencies.get(latency_key(contract, dtype, near))
        if us is not None:
            return us
    return None


def _order(verdict: Verdict, bound_us: float) -> tuple[bool, float, bool, int, float, str]:
    # No latency sorts as infinitely slow: after every measured row, by priority among themselves.
    row, latency = verdict.row, math.inf if verdict.latency_us is None else verdict.latency_us
    as_fast = verdict.latency_us is not None and latency <= bound_us
    return row.fallback, 0.0 if as_fast else latency, as_fast and row.library, -row.priority, latency, row.name


def why_after(loser: Verdict, winner: Verdict) -> str:
    """Why an eligible row is ranked after the one that serves."""
    return f"ranked after {winner.row.name}: {_difference(loser, winner)}"


def _difference(loser: Verdict, winner: Verdict) -> str:
    if loser.row.fallback and not winner.row.fallback:
        return "a fallback row comes last"
    if winner.latency_us is not None and loser.latency_us is not None and loser.latency_us != winner.latency_us:
        times = f"{loser.latency_us:g} us measured here against {winner.latency_us:g}"
        return f"{times}, which is as fast; {_preference(loser, winner)}" if loser.latency_us < winner.latency_us else times
    if winner.latency_us is not None and loser.latency_us is None:
        return f"no latency measured here for this shape, {winner.row.name} has {winner.latency_us:g} us"
    return _preference(loser, winner)


def _preference(loser: Verdict, winner: Verdict) -> str:
    if loser.latency_us is not None and loser.row.library and not winner.row.library:
        return "it calls a library"
    if loser.row.priority != winner.row.priority:
        return f"priority {loser.row.priority} against {winner.row.priority}"
    return "equal in rank, its name sorts later"


def why_first(winner: Verdict, others: Sequence[Verdict]) -> str:
    """Why the first of the eligible rows is before the others."""
    if not others:
        return "the only eligible row"
    if winner.latency_us is not None:
        first = "fastest of those" if winner.latency_us <= _fastest_us(others) else "as fast as any"
        return f"{first} measured here: {winner.latency_us:g} us"
    return f"no latency is measured here for this shape: by priority ({winner.row.priority}), then name"
