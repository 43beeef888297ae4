"""Times of launches on a GPU, made so that they cannot flatter.

A call is timed inside a CUDA graph of many, which takes the host out of it; what one empty node of a graph costs is told beside.
Calls rotate over sets of buffers: where the sets together pass the cache, every call finds its inputs in memory; where the inputs
are so small that they do not, they lie in the cache, as activations between two kernels of an engine do.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

COLD_BYTES = 256 << 20
"""What rotating sets amount to where they can: several times the cache of any card."""
MAX_SETS = 64
_LEAST_GRAPH_US = 400.0  # of work in a graph, so that its start does not count
_LEAST_CALLS = 8
_MOST_CALLS = 256
_LEAST_RUNS = 7
_MOST_RUNS = 100


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    Attributes:
        us, least_us, most_us: median, smallest and largest run.
        runs: how many.
        method: "graph", or "events" where a call cannot be captured: launched by the host, after the cache was flushed.
        first_call_s: the first call, compilation and loading included.
    """

    us: float
    least_us: float
    most_us: float
    runs: int
    method: str
    first_call_s: float


def sets_for(set_bytes: int) -> int:
    """How many sets of buffers to rotate over; one that is larger than any cache evicts itself."""
    return min(-(-COLD_BYTES // max(set_bytes, 1)), MAX_SETS)


def measure(calls: Sequence[Call], *, reset: Call | None = None, budget_s: float = 0.05, eager: bool = False) -> Timing:
    """Time one call, given one for each set of buffers.

    Args:
        calls: the same work on each set; results of one may not depend on another.
        reset: brings what the calls change back, on the device; runs before each timed run and is not timed.
        budget_s: how long to go on, beyond the least number of runs.
        eager: launch from the host in place of a graph.
    """
    start = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    first_call_s = time.perf_counter() - start
    for call in calls[1:4]:
        call()
    estimate = _estimate_us(calls)
    method, run, per_run = "events", _flushed(calls), 1
    if not eager:
        repeated = _repeated(calls, estimate)
        graph = _captured(repeated)
        if graph is not None:
            method, run, per_run = "graph", graph.replay, len(repeated)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < _LEAST_RUNS or (time.perf_counter() < end and len(times) < _MOST_RUNS):
        if reset is not None:
            reset()
        times.append(_run_us(run, flush=method == "events") / per_run)
    return Timing(statistics.median(times), min(times), max(times), len(times), method, first_call_s)


def empty_node_us() -> float:
    """What one trivial kernel costs inside a graph: below that no launch can be."""
    counter = torch.zeros(1, device="cuda")
    return measure([lambda: counter.add_(1)] * 2, budget_s=0.03).us


def _estimate_us(calls: Sequence[Call]) -> float:
    some = list(calls[:4])

    def run() -> None:
        for call in some:
            call()

    return max(_run_us(run) / len(some), 1.0)


def _repeated(calls: Sequence[Call], estimate_us: float) -> list[Call]:
    wanted = max(_LEAST_CALLS, len(calls), min(int(_LEAST_GRAPH_US / min(estimate_us, 40.0)), _MOST_CALLS))
    return [calls[i % len(calls)] for i in range(-(-wanted // len(calls)) * len(calls))]


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    """All calls as one graph, replayed once; None where a call cannot be captured."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError:  # a call that waits for the host, say
        torch.cuda.synchronize()
        return None
    return graph


def _flushed(calls: Sequence[Call]) -> Call:
    turn = iter(range(1 << 60))

    def run() -> None:
        calls[next(turn) % len(calls)]()

    return run


_flush: list[torch.Tensor] = []


def _run_us(run: Call, *, flush: bool = False) -> float:
    if flush:
        if not _flush:
            _flush.append(torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda"))
        _flush[0].zero_()
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) * 1e3
