"""What benchmarks of many streams share: a model behind AsyncLLM, streams whose tokens are timed, percentiles."""

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.random_checkpoint import CONFIGS, write_checkpoint
from benchmarks.record import write
from rapid_llm import AsyncLLM, SamplingParams
from rapid_llm.entrypoints.bench.streamed import Streamed
from rapid_llm.entrypoints.bench.summary import percentile

VOCABULARY = 40_000
"""Ids below this are in every model here."""


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """A benchmark's, with --model and --folder."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), help="random weights in this shape (default: the embedded model)")
    parser.add_argument("--folder", help="where they are written for the run (default: the system's temporary folder)")
    return parser


def report(name: str, results: dict[str, Any]) -> None:
    """Print what was measured, and record it under ``name``."""
    for key, value in results.items():
        print(f"{key:<28} {value}")
    print(f"written to {write(name, results)}")


@contextlib.asynccontextmanager
async def running(options: argparse.Namespace, **settings: object) -> AsyncIterator[AsyncLLM]:
    """The model of ``options``, ready."""
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if options.model is not None:
            write_checkpoint(Path(name), options.model)
        async with AsyncLLM(name if options.model is not None else None, **settings) as llm:
            yield llm


def prompt(length: int, seed: int) -> list[int]:
    """Random ids, the same for a seed."""
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


async def stream(llm: AsyncLLM, ids: Sequence[int], new: int) -> Streamed:
    """Send a request and time what comes, greedy and to its last id."""
    streamed = Streamed(time.perf_counter(), completion_tokens=0)
    async for output in llm.generate(ids, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)):
        count = len(output.outputs[0].token_ids)
        if count > streamed.tokens:
            streamed.arrivals.append(time.perf_counter())
            streamed.completion_tokens = count
    if streamed.tokens != new:
        raise SystemExit(f"{new} ids were asked for and {streamed.tokens} came, so no time is shown")
    return streamed


def percentiles(seconds: Sequence[float | None]) -> dict[str, float]:
    """Milliseconds: the 50th, 90th and 99th of a hundred, and the largest. What has no such time (None) is left out."""
    ordered = sorted(value for value in seconds if value is not None)
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "largest": 1.0}
    return {name: 1e3 * percentile(ordered, rank) for name, rank in ranks.items()}
