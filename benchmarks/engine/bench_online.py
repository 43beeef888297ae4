"""How long do requests wait when they come as they like?

    python -m benchmarks.engine.bench_online [--model qwen3-0.6b] [--rate 20] [--requests 200]

Poisson arrivals at ``rate`` a second, prompts of 64 to 512 random ids and 16 to 128 new ones, through AsyncLLM: time to the first
id, time an id after it, and gaps between outputs.
"""

import argparse
import asyncio
import random
import time
from typing import Any

from benchmarks.engine.traffic import parser_for, percentiles, prompt, report, running, stream
from rapid_llm.entrypoints.bench.arrivals import poisson
from rapid_llm.entrypoints.bench.streamed import Streamed


async def arrive(llm: Any, rate: float, requests: int) -> tuple[list[Streamed], float]:
    """Send all, each when its time comes; the streams, and the seconds that all of them took."""
    draw, tasks, started = random.Random(0), [], time.perf_counter()
    for number, after in enumerate(poisson(rate, requests, seed=0)):
        await asyncio.sleep(max(started + after - time.perf_counter(), 0))
        ids, new = prompt(draw.randint(64, 512), number), draw.randint(16, 128)
        tasks.append(asyncio.create_task(stream(llm, ids, new)))
    return list(await asyncio.gather(*tasks)), time.perf_counter() - started


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A few requests to warm up, then the run."""
    async with running(options, max_num_seqs=256) as llm:
        await arrive(llm, options.rate, 8)
        streams, seconds = await arrive(llm, options.rate, options.requests)
    ids = sum(each.tokens for each in streams)
    return {
        "model": options.model or "embedded",
        "requests/s": options.rate,
        "tokens/s": ids / seconds,
        "ttft, ms": percentiles([each.ttft for each in streams]),
        "tpot, ms": percentiles([each.tpot for each in streams]),
        "gaps, ms": percentiles([gap for each in streams for gap in each.gaps]),
    }


def main() -> None:
    """Measure, print, record."""
    parser = parser_for(__doc__)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=200)
    report("online", asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
