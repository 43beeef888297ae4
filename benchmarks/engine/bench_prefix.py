"""What does the prefix cache spare requests that begin alike, and what does it cost those that do not?

    python -m benchmarks.engine.bench_prefix [--model qwen3-0.6b] [--prefix 4096] [--requests 64]

Requests that share ``prefix`` ids and have 32 of their own, all at once, 8 new ids each; then as many that share nothing. Each
with the cache and without, in one run.
"""

import argparse
import asyncio
import time
from statistics import median
from typing import Any

from benchmarks.engine.traffic import parser_for, prompt, report, running, stream

OWN, NEW, RUNS = 32, 8, 5


async def wave(llm: Any, prompts: list[list[int]]) -> dict[str, float]:
    """All at once: the median time to the first id, and the time of all."""
    started = time.perf_counter()
    streams = await asyncio.gather(*(stream(llm, ids, NEW) for ids in prompts))
    return {"ttft, ms": 1e3 * median(timed.ttft for timed in streams), "seconds": time.perf_counter() - started}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians of a few runs, each with ids of its own."""
    results: dict[str, Any] = {"model": options.model or "embedded", "prefix": options.prefix, "requests": options.requests}
    for cached in (True, False):
        found: dict[str, list[dict[str, float]]] = {"shared": [], "apart": []}
        async with running(options, prefix_cache=cached, max_num_seqs=64) as llm:
            for run in range(RUNS + 1):
                common, numbers = prompt(options.prefix, run), range(1000 * run, 1000 * run + options.requests)
                waves = {
                    "shared": [common + prompt(OWN, number) for number in numbers],
                    "apart": [prompt(options.prefix // 4, number + 500) for number in numbers],
                }
                for name, prompts in waves.items():
                    result = await wave(llm, prompts)
                    found[name] += [result] if run else []  # the first is the warm-up
        for name, runs in found.items():
            key = f"{name}, {'with' if cached else 'without'} cache"
            results[key] = {what: median(run[what] for run in runs) for what in runs[0]}
    shared = [results[f"shared, {way} cache"]["ttft, ms"] for way in ("without", "with")]
    apart = [results[f"apart, {way} cache"]["seconds"] for way in ("with", "without")]
    return results | {"spared": shared[0] / shared[1], "cost": apart[0] / apart[1] - 1}


def main() -> None:
    """Measure, print, record."""
    parser = parser_for(__doc__)
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=64)
    report("prefix", asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
