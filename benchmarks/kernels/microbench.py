"""The frame of every kernel bench: cells of one op, arms beside each other, each checked before it is timed.

The floor of a cell is its contract's bytes and operations at ceilings measured in the same run; a time below it is a measuring
error and is flagged. Calls lie in CUDA graphs and rotate over sets of buffers (``rapid_llm.kernels.measure.timer``). One JSON
line a result goes to benchmarks/results/kernels_<device>.jsonl.
"""

import argparse
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from benchmarks import record
from benchmarks.kernels.cells import Cell, Skipped, few
from benchmarks.kernels.peers import PREFIX, Kept, Peer, best_peer, deliver, load_folder, peers_of
from rapid_llm.kernels.device import DeviceInfo, current_device
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.dispatcher.evidence import load_records
from rapid_llm.kernels.dispatcher.ranking import Question, rank
from rapid_llm.kernels.measure.ceilings import Ceilings, measure_ceilings
from rapid_llm.kernels.measure.timer import COLD_BYTES, Timing, measure
from rapid_llm.kernels.measure.tuner import fallback_row
from rapid_llm.kernels.measure.workloads import Workload, workload
from rapid_llm.kernels.ops.interfaces import KernelSpec

Function = Callable[..., Any]
Check = Callable[[str, Function], str]
"""From an arm's name and its function to what differs; empty where nothing does."""

_ABOVE = 0.97  # of the floor: what ceilings vary by from run to run
_LAUNCHED_S = 0.05  # a call: longer ones are launched one by one, where a graph of them would only cost time
_SLOW_S = 0.3  # a call: longer ones are told and not timed; no kernel that serves takes so long
_KEPT, _ROOM = 4 << 30, 48 << 30  # bytes held from cell to cell, and from arm to arm of one


class DeadDevice(RuntimeError):  # noqa: N818 - a state, told as what it is
    """After an illegal access every later call of the process fails: what was left has to run in another."""


def build(cell: Cell, device: str) -> Workload:
    """A cell's tensors as the engine would hold them."""
    return workload(cell.op, cell.sizes, cell.dtype, variant=cell.variant, device=device)


def by_fallback(cell: Cell, work: Workload) -> Check:
    """The check against what the op's plain-torch row gives."""
    expected = work.outputs(load_target(fallback_row(cell.op)))

    def problem(arm: str, function: Function) -> str:
        return work.difference(function, expected)

    return problem


def cold_text(work: Workload) -> str:
    """Where calls find their inputs: in memory, or in the cache, and why."""
    count, total = len(work.sets), len(work.sets) * work.set_bytes
    if count == 1:
        return f"1 set of {_bytes(work.set_bytes)}"
    if total >= COLD_BYTES:
        return f"rotating {count} sets, {_bytes(total)}"
    return f"in cache, {count} sets of {_bytes(work.set_bytes)}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


@dataclass(frozen=True)
class Bench:
    """What one module measures.

    Attributes:
        name: the module's.
        cells: the sweep.
        peers: by op, other implementations that torch alone gives.
        compiled: the same, of those that take long to compile: only with --compile.
        build: tensors of a cell, on a device.
        gate: from a cell's tensors to the check of its arms.
    """

    name: str
    cells: Sequence[Cell]
    peers: Mapping[str, Mapping[str, Peer]] = field(default_factory=dict)
    compiled: Mapping[str, Mapping[str, Peer]] = field(default_factory=dict)
    build: Callable[[Cell, str], Workload] = build
    gate: Callable[[Cell, Workload], Check] = by_fallback


class _Timed:
    """A function whose first call is timed, compilation included."""

    def __init__(self, function: Function, finish: Callable[[], None]) -> None:
        self._function, self._finish, self.seconds = function, finish, None

    def __call__(self, **arguments: Any) -> Any:
        start = time.perf_counter()
        result = self._function(**arguments)
        if self.seconds is None:
            self._finish()
            self.seconds = time.perf_counter() - start
        return result


class Session:
    """Benches of one process: one device, one measurement of its ceilings, one id, one limit.

    Args:
        options: parsed by ``parser``.
        device: "cuda", or "cpu" where a test brings its own clock.
        ceilings: measured here when None.
    """

    def __init__(self, options: argparse.Namespace, device: str = "cuda", ceilings: Ceilings | None = None) -> None:
        self.options, self.device = options, device
        self.started = time.perf_counter()
        self.info: DeviceInfo = current_device(device)
        self.ceilings = ceilings or measure_ceilings()
        self.run_id = f"{datetime.now(UTC).isoformat(timespec='seconds')} {uuid4().hex[:6]}"
        self.registry = load_folder(Path(options.peers)) if options.peers else {}
        self.left: list[Cell] = []
        self.dead = ""
        self._facts = record.facts() | {"run": self.run_id}
        self._told: set[tuple[str, str]] = set()

    def run(self, bench: Bench) -> list[dict[str, Any]]:
        """Measure every cell and record a line a result. Returns: the lines."""
        cells = [cell for cell in bench.cells if not self.options.op or cell.op in self.options.op]
        cells = few(cells) if self.options.quick else cells
        lines = []
        for number, cell in enumerate(cells):
            if time.perf_counter() - self.started >= self.options.limit:
                left = cells[number:]
                self.left += left
                print(f"{bench.name}: the limit of {self.options.limit:g} s is reached, left out: {'; '.join(map(str, left))}")
                break
            lines += self._cell(bench, cell)
            if self.dead:
                raise DeadDevice(f"the device takes no more calls after: {self.dead}")
            self._free(_KEPT)
        return lines

    def _cell(self, bench: Bench, cell: Cell) -> list[dict[str, Any]]:
        cost, floor_us = cell.cost, self.ceilings.floor_us(cell.cost, cell.itemsize)
        common = {
            **self._facts,
            "bench": bench.name,
            "op": cell.op,
            "cell": dict(cell.sizes),
            "variant": cell.variant,
            "dtype": cell.dtype,
            "read_bytes": cost.read,
            "written_bytes": cost.written,
            "flops": cost.flops,
            "floor_us": floor_us,
            "node_us": self.ceilings.node_us,
            "cold": "",
        }
        results: dict[str, dict[str, Any]] = {}
        try:
            work = bench.build(cell, self.device)
            check = bench.gate(cell, work)
            common["cold"] = cold_text(work)
        except Exception as error:  # noqa: BLE001 - too little memory, say: the next cell may fit
            results["*"] = _result(problem=f"no workload: {_text(error)}")
            print(f"{cell}: {results['*']['problem']}", flush=True)
            self._look(error)
        else:
            print(f"{cell}: floor {floor_us:.2f} us, {common['cold']}", flush=True)
            for name, make in self._arms(bench, cell).items():
                results[name] = self._arm(name, make, cell, work, check)
                self._tell(name, results[name], floor_us)
                if self.dead:
                    break
                self._free(_ROOM)
        return self._write(cell, common, results, floor_us)

    def _arms(self, bench: Bench, cell: Cell) -> dict[str, Function | Peer | str]:
        """Rows, then peers, by arm's name; a text is the reason why a row cannot run here."""
        question = Question(cell.op, self.info, cell.dtype, cell.sizes)
        ranking = rank(question, catalog(), load_records())
        arms: dict[str, Any] = {}
        for verdict in (*ranking.eligible, *ranking.rejected):
            # The check here takes the place of evidence: a row in the making is measured too.
            reasons = [reason for reason in verdict.reasons if not reason.startswith("unverified")]
            arms[verdict.row.name] = "; ".join(reasons) or verdict.row
        found = peers_of(self.registry, cell, compiled=self.options.compile)
        found |= bench.peers.get(cell.op, {}) | (bench.compiled.get(cell.op, {}) if self.options.compile else {})
        arms |= {PREFIX + name: peer for name, peer in found.items()}
        return {
            name: arm
            for name, arm in arms.items()
            if (not self.options.only or any(part in name for part in self.options.only))
            and not any(part in name for part in self.options.skip)
        }

    def _arm(self, name: str, arm: Any, cell: Cell, work: Workload, check: Check) -> dict[str, Any]:
        """Check, then time."""
        first: _Timed | None = None
        try:
            if isinstance(arm, str):
                raise Skipped(arm)
            work.reset()
            calls, function = self._calls(arm, cell, work)
            first = _Timed(function, self._finish)
            problem = check(name, first)
            if problem:
                return _result(problem=problem, first_call_s=first.seconds)
            seconds = self._seconds(calls[0])
            if seconds > _SLOW_S:
                return _result(skipped=f"one call takes {seconds:.2f} s", first_call_s=first.seconds)
            timing = measure(calls, reset=work.reset, budget_s=self.options.budget, eager=seconds > _LAUNCHED_S)
            return _result(timing, first_call_s=first.seconds)
        except Skipped as reason:
            return _result(skipped=str(reason))
        except Exception as error:  # noqa: BLE001 - whatever a peer's package raises is its own affair
            self._look(error)
            return _result(problem=_text(error), first_call_s=first.seconds if first else None)

    def _calls(self, arm: Any, cell: Cell, work: Workload) -> tuple[list[Callable[[], Any]], Function]:
        """An arm's call on each set, and as a function of the op's arguments for the check."""
        if isinstance(arm, KernelSpec):
            function = load_target(arm)
            return work.calls(function), function
        calls: list[Callable[[], Any]] = [Kept(call) for call in arm(cell, work)]
        return calls, lambda **arguments: deliver(cell.op, arguments, calls[0]())

    def _seconds(self, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        self._finish()
        return time.perf_counter() - start

    def _finish(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _free(self, kept: int) -> None:
        """Give memory back where more than ``kept`` bytes are held: doing so after every small cell would take the longest."""
        if self.device != "cpu" and torch.cuda.memory_reserved() > kept:
            gc.collect()
            torch.cuda.empty_cache()

    def _look(self, error: Exception) -> None:
        """Note whether the device still takes calls after an error."""
        try:
            self._finish()
        except RuntimeError:
            self.dead = _text(error)

    def _tell(self, name: str, result: Mapping[str, Any], floor_us: float) -> None:
        if result["skipped"]:
            if (name, result["skipped"]) not in self._told:
                print(f"  {name:<34} skipped: {result['skipped']}", flush=True)
            return
        if result["problem"]:
            print(f"  {name:<34} {result['problem']}", flush=True)
            return
        ratio = result["us"] / max(floor_us, self.ceilings.node_us)
        high = "  ABOVE THE CEILING" if result["us"] < _ABOVE * floor_us else ""
        spread = f"({result['least_us']:.2f} to {result['most_us']:.2f})"
        how = "" if result["method"] == "graph" else f" {result['method']}"
        print(
            f"  {name:<34} {result['us']:9.2f} us {spread:<22} {ratio:6.2f}x  first {result['first_call_s']:.2f} s{how}{high}",
            flush=True,
        )

    def _write(
        self, cell: Cell, common: Mapping[str, Any], results: Mapping[str, dict[str, Any]], floor_us: float
    ) -> list[dict[str, Any]]:
        best = best_peer(cell, {name: result["us"] for name, result in results.items() if result["us"] is not None}, floor_us)
        if best is not None:
            print(f"  best peer {best.us:.2f} us: {best.text}", flush=True)
        lines = []
        for name, result in results.items():
            if result["skipped"]:
                if (name, result["skipped"]) in self._told:  # the same reason at every cell is one line
                    continue
                self._told.add((name, result["skipped"]))
            us = result["us"]
            line = {
                **common,
                "arm": name,
                **result,
                "cold": common["cold"] + (", cache flushed before each call" if result["method"] == "events" else ""),
                "ratio": None if us is None else us / max(floor_us, self.ceilings.node_us),
                "above_ceiling": us is not None and us < _ABOVE * floor_us,
                "best_peer": best.text if best else None,
                "best_peer_us": best.us if best else None,
            }
            record.append(f"kernels_{self.info.name}", line)
            lines.append(line)
        return lines


def _result(
    timing: Timing | None = None, *, problem: str = "", skipped: str = "", first_call_s: float | None = None
) -> dict[str, Any]:
    return {
        "us": timing.us if timing else None,
        "least_us": timing.least_us if timing else None,
        "most_us": timing.most_us if timing else None,
        "runs": timing.runs if timing else 0,
        "method": timing.method if timing else None,
        "first_call_s": first_call_s,
        "problem": problem,
        "skipped": skipped,
    }


def _text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The flags of every bench."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help="two cells an op")
    result.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS", help="no new cell starts after it")
    result.add_argument("--budget", type=float, default=0.05, metavar="SECONDS", help="of one arm at one cell (default: 0.05)")
    result.add_argument("--op", action="append", metavar="OP", help="only this op; may be given again")
    result.add_argument("--only", action="append", default=[], metavar="PART", help="only arms whose name contains it")
    result.add_argument("--skip", action="append", default=[], metavar="PART", help="no arm whose name contains it")
    result.add_argument("--peers", metavar="FOLDER", help="the peers' scripts, whose implementations run beside")
    result.add_argument("--compile", action="store_true", help="also what torch.compile makes, slow to start")
    return result


def main(doc: str | None, *benches: Bench) -> None:
    """Run benches by the command line's flags."""
    options = parser(doc).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels are timed on a GPU, and torch sees none here")
    session = Session(options)
    c = session.ceilings
    print(
        f"{session.info.title}: reads {c.read_gbps:.0f} GB/s, copies {c.copy_gbps:.0f} GB/s, {c.tflops:.0f} TFLOP/s in bf16, "
        f"one node {c.node_us:.2f} us; run {session.run_id}"
    )
    try:
        lines = [line for bench in benches for line in session.run(bench)]
    except DeadDevice as error:
        raise SystemExit(f"{error}; leave that arm out with --skip") from None
    wrong = {(line["op"], line["arm"]) for line in lines if line["problem"]}
    took = time.perf_counter() - session.started
    print(f"{len(lines)} results in {took:.0f} s, in {record.RESULTS}/kernels_{session.info.name}.jsonl")
    if wrong:
        print("with problems: " + ", ".join(f"{op} {arm}" for op, arm in sorted(wrong)))
