"""How many tokens a second does an engine decode at a batch, and how far is a step from reading the weights once?

    python -m benchmarks.engine.bench_decode --model qwen3-0.6b [--batch 1,8,64,256] [--folder /tmp] [--option quantize=fp8]
        [--beside vllm,transformers]

Random weights in the shape of a model, prompts of 128 random ids, 128 new ids each, greedy. Decode time is that of a whole run
less that of the prompts alone. The device's own time is that of the same graph replayed back to back: the rest of a step is idle.
Peers load the same checkpoint, one at a time and before this engine does, and are measured in turn with it.
"""

import argparse
import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.decode_rate import Prompts, decode_rate
from benchmarks.engine.peer_engines import LOADERS, PeerEngine
from benchmarks.engine.random_checkpoint import CONFIGS, write_checkpoint
from benchmarks.record import write
from rapid_llm import LLM, SamplingParams


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--folder", help="where the checkpoint is written for the run (default: the system's temporary folder)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="a setting of LLM")
    parser.add_argument("--beside", default="", metavar="NAMES", help=f"peers, of {', '.join(LOADERS)}")
    options = parser.parse_args()
    batches = [int(each) for each in options.batch.split(",")]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        num_bytes = write_checkpoint(Path(name), options.model, layers=options.layers)
        peers, ready = [], {}
        for peer in filter(None, options.beside.split(",")):  # one after the other: vLLM refuses memory that moves meanwhile
            peers.append(PeerEngine(peer, Path(name), max(batches)))
            ready[peer] = peers[-1].ready()
        start = time.perf_counter()
        llm = LLM(name, max_model_len=4096, max_num_seqs=max(batches), **settings(options.option))
        results: dict[str, Any] = {"model": options.model, "layers": options.layers, "GB": num_bytes / 1e9} | ready
        results["seconds to load"] = time.perf_counter() - start
    for batch in batches:
        results[f"batch {batch}"] = decode(llm, batch)
        for peer in peers:
            results[f"batch {batch}, {peer.name}"] = peer.measure(batch)
    for peer in peers:
        peer.end()
    if torch.cuda.is_available():
        results["GB allocated"] = torch.cuda.max_memory_allocated() / 1e9
    for key, value in results.items():
        print(f"{key:<18} {_shown(value)}", flush=True)
    print(f"written to {write('decode_cuda' if torch.cuda.is_available() else 'decode_cpu', results)}")


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    medians = {name: each["median"] if isinstance(each, dict) else each for name, each in value.items()}
    return ", ".join(f"{name} {each:,.3f}" if isinstance(each, float) else f"{name} {each}" for name, each in medians.items())


def settings(pairs: list[str]) -> dict[str, Any]:
    """Settings of LLM from NAME=VALUE, a value being JSON or else a string."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
        found[name] = value
    return found


def decode(llm: LLM, batch: int) -> dict[str, Any]:
    """Its rate, the time of a step, and how much of a step the device idles."""
    padded = padded_step(llm, batch)
    found = decode_rate(lambda prompts, new: seconds(llm, prompts, new), batch)
    if padded is not None and padded.replay is not None:
        alone = found["ms of the device alone"] = replayed_ms(padded)
        found["device idle"] = 1 - alone / found["ms a step"]["median"]
    return found


def padded_step(llm: LLM, batch: int) -> Any:
    """The step that a batch is padded to, which keeps what it was last filled with; None without graphs of decode steps, of
    which deterministic has none."""
    graphs = llm._engine.worker.graphs
    sizes = [] if graphs is None else [size for size in graphs._decode_sizes if size >= batch]
    if not sizes:
        return None
    padded = graphs._steps[graphs._decodes[sizes[0]]]
    fill = padded.fill

    def filling(step: Any) -> None:
        padded.last = step
        fill(step)

    padded.fill = filling
    return padded


def replayed_ms(padded: Any) -> float:
    """A step whose graph is replayed with nothing in between, on the indices that it had last."""
    padded.fill(padded.last)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        padded.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 20


def seconds(llm: LLM, prompts: Prompts, new: int) -> float:
    """Of ``new`` greedy ids of each prompt, whole."""
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
