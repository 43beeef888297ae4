"""How long does a long prompt hold up the streams beside it, and how long do they hold it up?

    python -m benchmarks.engine.bench_mixed_load [--model qwen3-0.6b] [--prompt 65536] [--streams 16]

``streams`` answers run; their gaps are taken while they are alone and while the prompt is computed. The prompt's time to its
first id is taken among them and alone.
"""

import argparse
import asyncio
from itertools import pairwise
from typing import Any

from benchmarks.engine.traffic import parser_for, percentiles, prompt, report, running, stream
from rapid_llm.entrypoints.bench.streamed import Streamed


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Alone, then among the streams."""
    context = options.prompt + 64
    first, second, third = (prompt(options.prompt, seed) for seed in range(3))  # not while streams are timed
    async with running(options, max_model_len=context, max_num_seqs=options.streams + 1, max_kv_tokens=4 * context) as llm:
        await stream(llm, first, 1)
        alone = await stream(llm, second, 1)
        tasks = [asyncio.create_task(stream(llm, prompt(32, 10 + i), options.new)) for i in range(options.streams)]
        await asyncio.sleep(options.quiet)
        among = await stream(llm, third, 1)
        streams = await asyncio.gather(*tasks)
    return {
        "model": options.model or "embedded",
        "prompt": options.prompt,
        "streams": options.streams,
        "quiet gaps, ms": percentiles(_gaps(streams, 0.0, among.asked)),
        "gaps beside the prompt, ms": percentiles(_gaps(streams, among.asked, among.arrivals[0])),
        "ttft alone, ms": 1e3 * alone.ttft,
        "ttft among them, ms": 1e3 * among.ttft,
        "of alone": among.ttft / alone.ttft,
    }


def _gaps(streams: list[Streamed], start: float, end: float) -> list[float]:
    """Gaps between outputs that ended between two times."""
    found = []
    for each in streams:
        found += [later - sooner for sooner, later in pairwise(each.arrivals) if start < later <= end]
    if not found:
        raise SystemExit("no stream put out anything in that time: ask for more new ids, or a longer quiet time")
    return found


def main() -> None:
    """Measure, print, record."""
    parser = parser_for(__doc__)
    parser.add_argument("--prompt", type=int, default=65_536)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--new", type=int, default=4000, help="new ids of each stream")
    parser.add_argument("--quiet", type=float, default=1.0, help="seconds before the prompt comes")
    report("mixed_load", asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
