"""The offline search: for each shape bucket the fastest of the declared tiles that give the right result; and rows' latencies.

Never at import, never at a first call: this runs when somebody asks for it (``rapid-llm kernels tune``) and writes stores, which
a start reads.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import DeviceInfo
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.dispatch import forget_choices, load_target
from rapid_llm.kernels.dispatcher.evidence import evidence_for, latency_key, load_records, record_latencies
from rapid_llm.kernels.dispatcher.ranking import Question, missing_packages, rank
from rapid_llm.kernels.measure.candidates import candidates
from rapid_llm.kernels.measure.serving import tuning_sizes
from rapid_llm.kernels.measure.timer import Timing, measure
from rapid_llm.kernels.measure.workloads import Workload, variants, workload
from rapid_llm.kernels.ops.interfaces import KernelSpec, Sizes
from rapid_llm.kernels.ops.tile_policy import (
    Tile,
    choose_tiles,
    fits,
    forget_tiles,
    kept_tiles,
    shape_bucket,
    stored_sizes,
    tiled_ops,
    tiles_by,
)
from rapid_llm.kernels.provenance import source_hash, triton_minor
from rapid_llm.kernels.store import read_stores, user_folder, write_user_store

_CONTEXT = 131_072  # keys that a row of an engine's page table holds, with a model whose context is so long
_WORTH = 0.98  # a tile must be this much faster than the heuristic's to be stored: less is noise


@dataclass(frozen=True)
class Measured:
    """One row's time at one set of sizes; ``problem`` says why there is none."""

    row: str
    op: str
    dtype: str
    sizes: Sizes
    variant: str
    timing: Timing | None
    problem: str = ""


@dataclass(frozen=True)
class Tuned:
    """What the search found for one bucket.

    Attributes:
        entry: the store's: op, bucket, dtype, target, source_hash, triton, tile, us and heuristic_us (geometric means).
        tried, refused: how many tiles were timed, and why others were not.
    """

    entry: dict[str, Any]
    tried: int
    refused: tuple[str, ...] = field(default=())


def tunable(ops: Sequence[str] | None) -> list[str]:
    """The ops whose rows take tiles, or those of them that were asked for. Raises: ConfigError on another name."""
    known = [op for op in catalog().contracts if op in tiled_ops()]
    for op in ops or ():
        if op not in known:
            raise ConfigError("this op has no tiles to search", got=op, wanted=", ".join(known), change="name one of those")
    return [op for op in known if ops is None or op in ops]


def native_row(op: str) -> KernelSpec:
    """The row that the tiles of an op belong to."""
    rows = [row for row in catalog().rows[op] if "triton" in row.requires.packages]
    return max(rows, key=lambda row: row.priority)


def tune_op(
    op: str, device: DeviceInfo, dtype: str, sizes: Sequence[Sizes] | None = None, *, recheck: bool = False
) -> Iterator[Tuned]:
    """Search the tiles of every bucket that ``sizes`` (None: the tuning sizes) fall into, one result each.

    A bucket may hold several sizes (a decode tile serves every batch and context): the tile is best for all of them together.
    With ``recheck`` a bucket that the stores hold tiles for, of whatever version of the kernel, tries those and the heuristic's.
    """
    for bucket, members in _buckets(op, device, dtype, sizes).items():
        yield _tune_bucket(op, device, dtype, bucket, members, recheck)


def compile_op(op: str, device: DeviceInfo, dtype: str, shard: int, shards: int, *, recheck: bool = False) -> int:
    """Compile what a search of ``op`` will try, into the compiler's cache: the part of it that falls to one of ``shards``.

    Returns: how many tiles were launched once. A search after it only measures.
    """
    function, turn, launched = load_target(native_row(op)), 0, 0
    for bucket, members in _buckets(op, device, dtype, None).items():
        call = None
        for tile in _to_try(op, device, dtype, bucket, members[0][0], recheck):
            turn += 1
            if turn % shards != shard:
                continue
            call = call or workload(op, members[0][1], dtype, device=device.type, max_sets=1)
            with tiles_by(lambda *_, tile=tile: tile), suppress(*_refusals()):  # the search will report them
                function(**call.sets[0])
                launched += 1
    return launched


def count_buckets(op: str, device: DeviceInfo, dtype: str) -> int:
    """How many results ``tune_op`` will give."""
    return len(_buckets(op, device, dtype, None))


def is_verified_here(op: str, device: DeviceInfo) -> bool:
    """Whether every row of ``op`` that this machine can launch, fallback rows aside, has passed here."""
    records, triton = load_records(), triton_minor()
    rows = [row for row in catalog().rows[op] if not row.fallback and not row.requires.unmet(device)]
    launchable = [row for row in rows if not missing_packages(row)]
    states = [evidence_for(row, device, triton=triton, here=True, records=records).state for row in launchable]
    return all(state == "verified_here" for state in states)


def _buckets(op: str, device: DeviceInfo, dtype: str, sizes: Sequence[Sizes] | None) -> dict[str, list[tuple[Sizes, Sizes]]]:
    """Sizes as the row asks for its tile, and whole, by bucket."""
    function = load_target(native_row(op))
    buckets: dict[str, list[tuple[Sizes, Sizes]]] = {}
    for each in sizes if sizes is not None else tuning_sizes(op):
        asked = _sizes_asked(op, function, device, dtype, each)
        if asked is not None:
            buckets.setdefault(shape_bucket(stored_sizes(op, asked)), []).append((asked, each))
    return buckets


def _sizes_asked(op: str, function: Callable[..., Any], device: DeviceInfo, dtype: str, sizes: Sizes) -> Sizes | None:
    """The sizes by which the row asks for its tile in this call."""
    seen: list[Sizes] = []

    class Asked(Exception):  # noqa: N818 - a way out of the call, before anything is launched
        pass

    def note(asked_op: str, asked_dtype: str, asked: Sizes) -> Tile:
        seen.append(asked)
        raise Asked

    call = workload(op, sizes, dtype, device=device.type, max_sets=1)
    with tiles_by(note), suppress(Asked):
        function(**call.sets[0])
    return seen[0] if seen else None


def _to_try(op: str, device: DeviceInfo, dtype: str, bucket: str, sizes: Sizes, recheck: bool) -> list[Tile]:
    """The tiles of a search, the heuristic's first."""
    declared = candidates(op, device, dtype, sizes)
    if not recheck:
        return declared
    kept = [tile for tile in kept_tiles(op, device.name, dtype, bucket) if fits(op, tile, device, dtype, sizes)]
    return list(dict.fromkeys([declared[0], *kept])) if kept else declared


def _tune_bucket(
    op: str, device: DeviceInfo, dtype: str, bucket: str, members: list[tuple[Sizes, Sizes]], recheck: bool
) -> Tuned:
    row = native_row(op)
    function, oracle = load_target(row), load_target(_oracle(op, device))
    calls = [workload(op, sizes, dtype, variant=variant, device=device.type) for _, sizes in members for variant in variants(op)]
    tiles = _to_try(op, device, dtype, bucket, members[0][0], recheck)
    with tiles_by(lambda *_: tiles[0]):
        expected = [call.outputs(oracle) for call in calls]
    times: dict[Tile, float] = {}
    refused: list[str] = []
    for tile in tiles:
        with tiles_by(lambda *_, tile=tile: tile):
            problem = _problem(function, calls, expected)
            if problem:
                refused.append(f"{tile.launch()}: {problem}")
                continue
            runs = [measure(call.calls(function), reset=call.reset, budget_s=0.01) for call in calls]
        times[tile] = geometric_mean(run.us for run in runs)
    if not times:
        raise ConfigError(
            f"no tile of {op} works", got="; ".join(refused)[:300], wanted="one at least", change="run kernels verify"
        )
    best = min(times, key=lambda tile: times[tile])
    usual = choose_tiles(op, device, dtype, members[0][0]).tile
    if usual in times and times[best] > _WORTH * times[usual]:
        best = usual
    entry = {
        "op": op,
        "bucket": bucket,
        "dtype": dtype,
        "target": row.target,
        "source_hash": source_hash(row.target),
        "triton": triton_minor(),
        "tile": best.launch(),
        "us": round(times[best], 3),
        "heuristic_us": round(times[usual], 3) if usual in times else None,
    }
    return Tuned(entry, len(times), tuple(refused))


def _problem(function: Callable[..., Any], calls: Sequence[Workload], expected: Sequence[Mapping[str, torch.Tensor]]) -> str:
    try:
        for call, wanted in zip(calls, expected, strict=True):
            problem = call.difference(function, wanted)
            if problem:
                return problem
    except _refusals() as error:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def _refusals() -> tuple[type[Exception], ...]:
    """How a compiler or a driver says that a tile is not for this card."""
    from triton.errors import TritonError

    return (TritonError, RuntimeError, ValueError)


def _oracle(op: str, device: DeviceInfo) -> KernelSpec:
    """The row that says what is right: the native one as its evidence knows it, with the heuristic's tile; else plain torch."""
    row = native_row(op)
    evidence = evidence_for(row, device, triton=triton_minor(), here=True, records=load_records())
    return row if evidence.state == "verified_here" else fallback_row(op)


def fallback_row(op: str) -> KernelSpec:
    """The plain-torch row of an op."""
    return next(row for row in catalog().rows[op] if row.fallback)


def measure_rows(op: str, device: DeviceInfo, dtype: str, sizes: Sizes, *, budget_s: float = 0.03) -> list[Measured]:
    """Time every row that may serve ``op`` at these sizes, fallback rows left out, each checked before it is timed."""
    ranking = rank(Question(op, device, dtype, sizes), catalog(), load_records())
    rows = [verdict.row for verdict in ranking.eligible if not verdict.row.fallback]
    results = []
    for variant in variants(op):
        call = with_whole_contexts(workload(op, sizes, dtype, variant=variant, device=device.type))
        expected = call.outputs(load_target(fallback_row(op)))
        for row in rows:
            function = load_target(row)
            problem = _problem(function, [call], [expected])
            timing = None if problem else measure(call.calls(function), reset=call.reset, budget_s=budget_s)
            results.append(Measured(row.name, op, dtype, sizes, variant, timing, problem))
    return results


def with_whole_contexts(call: Workload) -> Workload:
    """The call with page tables as wide as an engine's: a row may cut a sequence by what a table could hold."""
    if "seq_lens" not in call.sets[0]:
        return call
    sets = []
    for arguments in call.sets:
        table = arguments["page_table"]
        wide = table.new_zeros(table.shape[0], max(table.shape[1], _CONTEXT // arguments["page_size"]))
        wide[:, : table.shape[1]] = table
        sets.append({**arguments, "page_table": wide})
    return replace(call, sets=tuple(sets))


def store_tiles(device: DeviceInfo, tuned: Sequence[Tuned]) -> Path:
    """Keep what searches found in the user's store, in place of older entries of the same op, bucket, dtype and Triton.

    Returns: the file written. Raises: ConfigError when it cannot be.
    """
    new = [each.entry for each in tuned]
    keys = {_key(entry) for entry in new}
    path = user_folder("tuned") / f"{device.name}.json"
    older = [entry for store in read_stores("tuned") if store.path == path for entry in store.entries if _key(entry) not in keys]
    written = write_user_store("tuned", device.name, [*older, *new])
    forget_tiles()
    return written


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(name) for name in ("op", "bucket", "dtype", "triton"))


def store_latencies(device: DeviceInfo, measured: Sequence[Measured]) -> None:
    """Lay times beside the evidence of their rows; of several under one key (variants, hidden sizes) the geometric mean."""
    by_row: dict[str, dict[str, list[float]]] = {}
    for each in measured:
        if each.timing is not None:
            key = latency_key(catalog().contract(each.op), each.dtype, each.sizes)
            by_row.setdefault(each.row, {}).setdefault(key, []).append(each.timing.us)
    rows = {row.name: row for row in catalog().all_rows()}
    for name, times in by_row.items():
        means = {key: round(geometric_mean(values), 3) for key, values in times.items()}
        record_latencies(rows[name], device, means)
    forget_choices()


@dataclass
class Clock:
    """How far a run has come and how long the rest will take at the pace so far."""

    total: int
    done: int = 0
    started: float = field(default_factory=time.perf_counter)

    def step(self) -> str:
        """Count one more; a line such as "12 of 340, about 95 s left"."""
        self.done += 1
        left = (time.perf_counter() - self.started) / self.done * (self.total - self.done)
        return f"{self.done} of {self.total}, about {left:.0f} s left"
