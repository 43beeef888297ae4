"""Where does the time of a decode step go?

    python -m benchmarks.engine.profile_step [--model qwen3-0.6b] [--batch 1,8,64] [--folder /tmp] [--option NAME=VALUE]

The captured step of a batch is replayed, and each kernel's share is told: from the end of the kernel before it to its own end.
Kernels that begin while the one before them ends wait within their own duration, so that durations add up to more than the step.
"""

import argparse
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.bench_decode import padded_step, replayed_ms, seconds, settings
from benchmarks.engine.decode_rate import PROMPT, VOCABULARY
from benchmarks.engine.random_checkpoint import CONFIGS, write_checkpoint
from rapid_llm import LLM

REPLAYS = 5


def main() -> None:
    """Replay, trace, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--folder", help="where the checkpoint is written for the run (default: the system's temporary folder)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="a setting of LLM")
    options = parser.parse_args()
    batches = [int(each) for each in options.batch.split(",")]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        write_checkpoint(Path(name), options.model)
        llm = LLM(name, max_model_len=4096, max_num_seqs=max(batches), **settings(options.option))
    for batch in batches:
        step = padded_step(llm, batch)
        if step is None:
            raise SystemExit("no decode step is a graph with these settings")
        ids = torch.randint(VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)).tolist()
        seconds(llm, ids, PROMPT)
        print(f"batch {batch}: {replayed_ms(step):.3f} ms a step, replayed back to back")
        for kernel, (calls, us) in sorted(shares(step).items(), key=lambda item: -item[1][1]):
            print(f"  {us:8.1f} us in {calls:5.0f} x {us / calls:6.2f} us  {kernel}")


def shares(step: Any) -> dict[str, tuple[float, float]]:
    """Launches of each kernel in one replay, and their microseconds together."""
    step.fill(step.last)
    torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(REPLAYS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            step.replay()
            torch.cuda.synchronize()
        ended = None
        on_device = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        for event in sorted(on_device, key=lambda event: event.time_range.end):
            name = re.split(r"[<(]", event.name)[0]
            found[name].append(event.time_range.end - (event.time_range.start if ended is None else ended))
            ended = event.time_range.end
    return {name: (len(times) / REPLAYS, sum(times) / REPLAYS) for name, times in found.items()}


if __name__ == "__main__":
    main()
