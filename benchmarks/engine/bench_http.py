"""How many tokens a second come through HTTP, next to those of the engine alone, and does it hold a thousand streams?

    python -m benchmarks.engine.bench_http [--model qwen3-0.6b] [--streams 64] [--new 128]

The same requests through AsyncLLM and then through `rapid-llm serve`, a connection each; every stream must bring each of its ids.
The server's memory is looked at before and after. --tiny takes random weights of two layers: what is left is the work of streams.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.random_checkpoint import write_checkpoint
from benchmarks.engine.traffic import parser_for, percentiles, report, stream
from rapid_llm import AsyncLLM
from rapid_llm.entrypoints.bench.client import Client
from rapid_llm.entrypoints.bench.streamed import Streamed

PROMPT_IDS = 64
SETTINGS = {"max_num_seqs": 256}


def ids(number: int, below: int) -> list[int]:
    """The prompt of one stream."""
    return [(7 * number + 13 * place) % below for place in range(PROMPT_IDS)]


async def in_process(model: str | None, options: argparse.Namespace) -> float:
    """Tokens a second of AsyncLLM, the second time: during the first, graphs are still captured."""
    async with AsyncLLM(model, **SETTINGS) as llm:
        for _ in range(2):
            began = time.perf_counter()
            await asyncio.gather(*(stream(llm, ids(i, options.ids), options.new) for i in range(options.streams)))
        return options.streams * options.new / (time.perf_counter() - began)


async def over_http(port: int, options: argparse.Namespace) -> tuple[float, list[Streamed]]:
    """Tokens a second of the server, the second time, and its streams. SystemExit where an id was lost."""
    client = Client(f"http://127.0.0.1:{port}/v1")

    async def ask(number: int, new: int) -> Streamed:
        given = {"temperature": 0, "ignore_eos": True, "prompt": ids(number, options.ids), "max_tokens": new}
        return await client.stream("/completions", given)

    for _ in range(2):
        began = time.perf_counter()
        results = await asyncio.gather(*(ask(i, options.new) for i in range(options.streams)))
    seconds = time.perf_counter() - began
    client.close()
    lost = [each for each in results if each.error or each.completion_tokens != options.new]
    if lost:
        raise SystemExit(f"{len(lost)} of {len(results)} streams are not whole, so no time is shown: {lost[0]}")
    return options.streams * options.new / seconds, results


def start(model: str | None) -> tuple[subprocess.Popen[str], int]:
    """A server that is ready, and its port."""
    command = [
        sys.executable,
        "-m",
        "rapid_llm",
        "serve",
        *([] if model is None else [model]),
        "--port",
        "0",
        "--no-log-requests",
    ]
    process = subprocess.Popen([*command, "--max-num-seqs", "256"], stderr=subprocess.PIPE, text=True)
    port = 0
    for line in process.stderr or ():
        port = int(found[1]) if (found := re.search(r"listening on http://127.0.0.1:(\d+)", line)) else port
        if '"event": "ready' in line:
            return process, port
    raise SystemExit("the server did not start")


def resident_mb(process: subprocess.Popen[str]) -> float:
    """Memory of the server's own process, without its engine."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(model: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Both ways."""
    alone = asyncio.run(in_process(model, options))
    process, port = start(model)
    try:
        before = resident_mb(process)
        through, streams = asyncio.run(over_http(port, options))
        after = resident_mb(process)
    finally:
        process.terminate()
        process.wait()
    return {
        "model": "tiny" if options.tiny else options.model or "embedded",
        "streams": options.streams,
        "tokens/s in process": alone,
        "tokens/s over HTTP": through,
        "share": through / alone,
        "ttft over HTTP, ms": percentiles([each.ttft for each in streams]),
        "pieces a stream": sum(len(each.arrivals) for each in streams) / len(streams),
        "server before and after, MB": [round(before), round(after)],
        "server's exit status": process.returncode,
    }


def main() -> None:
    """Measure, print, record."""
    parser = parser_for(__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.ids = 256 if options.tiny else 40_000
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if options.tiny:
            from tests.tiny_model import save_checkpoint, tiny_llama

            save_checkpoint(tiny_llama(), Path(name))
        elif options.model is not None:
            write_checkpoint(Path(name), options.model)
        model = name if options.tiny or options.model is not None else None
        report("http", measure(model, options))


if __name__ == "__main__":
    main()
