"""Does dispatch serve, in every cell, the fastest verified row?    python -m benchmarks.kernels.check_served

Measures every verified row of every op that has more than one, afresh, and compares with what a layer would bind by the latencies
in the stores. Differences under 6 % are noise. Ends with 1 when a cell is served by a slower row.
"""

import argparse
import math
import sys
from collections import defaultdict
from statistics import geometric_mean

from rapid_llm.kernels.device import current_device
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.dispatch import choose_by_size
from rapid_llm.kernels.measure.serving import serving_sizes
from rapid_llm.kernels.measure.tuner import measure_rows
from rapid_llm.kernels.ops.interfaces import Contract, Sizes

NOISE = 1.06


def main() -> int:
    """Measure, compare, print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", action="append", help="only this op; may be given again")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    device, cells, slower = current_device("cuda"), 0, 0
    for op in options.op or catalog().contracts:
        if sum(not row.fallback for row in catalog().rows[op]) < 2:
            continue
        contract = catalog().contract(op)
        for visible, times in _times(contract, options.dtype).items():
            sizes = dict(visible)
            count = sizes.pop(contract.free)
            pieces = choose_by_size(op, device=device, dtype=options.dtype, **sizes)
            served = next(row.name for most, row in pieces if count <= most)
            best = min(times, key=lambda name: times[name])
            cells += 1
            if times.get(served, math.inf) > NOISE * times[best]:
                slower += 1
                shape = " ".join(f"{name}={value}" for name, value in visible)
                print(f"{op} {shape}: {served} {times.get(served, math.nan):.2f} us, {best} {times[best]:.2f} us")
    print(f"{cells} cells with a choice, {slower} served by a row that is more than {NOISE - 1:.0%} slower than the fastest")
    return 1 if slower else 0


def _times(contract: Contract, dtype: str) -> dict[tuple[tuple[str, int], ...], dict[str, float]]:
    """Microseconds by row for each set of the sizes that a layer and a call tell; means over those that they do not."""
    device = current_device("cuda")
    found: dict[tuple[tuple[str, int], ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sizes in serving_sizes(contract.op):
        for each in measure_rows(contract.op, device, dtype, sizes):
            if each.timing is not None:
                found[_visible(contract, sizes)][each.row].append(each.timing.us)
    return {key: {row: geometric_mean(each) for row, each in rows.items()} for key, rows in found.items()}


def _visible(contract: Contract, sizes: Sizes) -> tuple[tuple[str, int], ...]:
    return tuple((name, value) for name, value in sizes.items() if name not in contract.hidden)


if __name__ == "__main__":
    sys.exit(main())
