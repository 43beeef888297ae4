"""How long does a decode step take by the length of its context, and how far is it from reading weights and K and V once?

    python -m benchmarks.engine.bench_context [--model qwen3-0.6b] [--batch 8] [--option kv_dtype=fp8_e4m3]
    python -m benchmarks.engine.bench_context --plot docs/context.svg  # the last one measured

Random weights, the captured step of ``batch`` sequences, replayed back to back on a page table whose every page is another.
Lengths from 128 to 131,072, as far as the pool holds them. Measuring needs a GPU, plotting does not.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engine.bench_decode import settings
from benchmarks.engine.random_checkpoint import CONFIGS, write_checkpoint
from benchmarks.kernels.report import Point, alone, plot
from benchmarks.record import RESULTS, write
from rapid_llm import LLM
from rapid_llm.config import PAGE_SIZE, pages_for
from rapid_llm.step import Chunk, PageUpdate, SlotSetup, StepPlan

READ_TB_S = 4.63
"""What a plain read of large buffers reaches on an H200; the floor is bytes over it."""
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
REPLAYS, RUNS = 20, 5
NAME = "context_cuda"


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--folder", help="where the checkpoint is written for the run")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="a setting of LLM")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what was measured last, and measure nothing")
    options = parser.parse_args()
    if options.plot is not None:
        options.plot.write_text(drawn(json.loads((RESULTS / f"{NAME}.jsonl").read_text().splitlines()[-1])["results"]))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        weight_bytes = write_checkpoint(Path(name), options.model)
        llm = LLM(name, max_model_len=max(CONTEXTS), max_num_seqs=options.batch, **settings(options.option))
    results: dict[str, Any] = {"model": options.model, "batch": options.batch, "options": options.option}
    pool = llm._engine.worker.pool
    token_bytes = pool.nbytes / llm._engine.config.max_kv_tokens
    for context in CONTEXTS:
        if options.batch * pages_for(context) * PAGE_SIZE > llm._engine.config.max_kv_tokens:
            results[f"context {context}"] = "does not fit"
            continue
        ms = step_ms(llm, options.batch, context)
        floor = 1e3 * (weight_bytes + options.batch * context * token_bytes) / (READ_TB_S * 1e12)
        results[f"context {context}"] = {"ms": ms, "floor ms": floor, "over floor": ms / floor}
    for key, value in results.items():
        shown = ", ".join(f"{name} {each:.3f}" for name, each in value.items()) if isinstance(value, dict) else value
        print(f"{key:<16} {shown}", flush=True)
    print(f"written to {write(NAME, results)}")


@torch.inference_mode()
def step_ms(llm: LLM, batch: int, context: int) -> float:
    """Median time of the step that adds one token to each of ``batch`` sequences of ``context`` tokens."""
    worker = llm._engine.worker
    graphs = worker.graphs
    while graphs.pending:
        graphs.capture_next()
    pages = pages_for(context)
    plan = StepPlan(
        decodes=[Chunk(slot, context - 1, (7,), samples=True) for slot in range(batch)],
        slots=[SlotSetup(slot, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logprobs=-1) for slot in range(batch)],
        pages=[PageUpdate(slot, 0, tuple(range(slot * pages, (slot + 1) * pages))) for slot in range(batch)],
    )
    worker.sampler.setup(plan.slots)
    worker.builder.add_pages(plan.pages)
    arrays = worker.builder.arrays(plan)
    padded = graphs._steps[graphs.bucket_of(arrays)]
    padded.fill(arrays)
    times = []
    for _ in range(RUNS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            padded.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPLAYS)
    return median(times[1:])


def drawn(results: dict[str, Any]) -> str:
    """An SVG of a step's time and its floor over the length of context."""
    arms = ("a step", "weights, keys and values read once")
    points = []
    for context in CONTEXTS:
        found = results[f"context {context}"]
        if isinstance(found, dict):
            for arm, name in zip(arms, ("ms", "floor ms"), strict=True):
                points.append(Point(context, found[name], arm, f"{arm}, {context:,} tokens: {found[name]:.2f} ms"))
    title = f"A step of {results['batch']} sequences of {results['model']} over the length of their context, and its floor"
    return alone(plot(title, ("tokens of context", "milliseconds: a step (round), its floor (square)"), points, arms, {}))


if __name__ == "__main__":
    main()
