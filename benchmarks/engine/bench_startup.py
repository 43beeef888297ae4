"""How long from exec to the first token, to --help and to a server's first answer, next to `import torch` alone?

    python -m benchmarks.engine.bench_startup                       # the embedded model, on the CPU
    python -m benchmarks.engine.bench_startup --model qwen3-0.6b    # a random checkpoint of that shape, on the GPU

Whole processes, in turn, page cache warm; each ratio is taken within a turn. On the CPU a server is asked again and again: until
it answers at all (503, the engine is loading), and until it is ready. On a GPU the first token is timed with empty kernel caches
(Triton's, and this project's own) and with those that such a start has left.
"""

import argparse
import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import summary, write

FIRST_TOKEN = ["-m", "rapid_llm", "generate", "Once upon a time", "--max-tokens", "1", "--temperature", "0"]
IMPORT_TORCH = ["-c", "import torch"]
COMMANDS = {
    "import torch": IMPORT_TORCH,
    "first token": [*FIRST_TOKEN, "--device", "cpu"],
    "help": ["-m", "rapid_llm", "--help"],
    "python alone": ["-c", "pass"],
}


def seconds(arguments: list[str], **environment: str) -> float:
    """Wall time of one process; an error of it is an error here."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=os.environ | environment)
    took = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return took


def serving() -> tuple[float, float]:
    """Seconds from exec to a server's first answer, and to its first that says ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = time.perf_counter()
    server = subprocess.Popen([sys.executable, "-m", "rapid_llm", "serve", "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        first = _until(port, start, {200, 503})
        return first, _until(port, start, {200})
    finally:
        server.terminate()
        server.wait()


def _until(port: int, start: float, wanted: set[int]) -> float:
    while True:
        with contextlib.suppress(OSError):
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            client.request("GET", "/ready")
            if client.getresponse().status in wanted:
                return time.perf_counter() - start
        time.sleep(0.005)


def on_gpu(model: str, folder: str | None, runs: int) -> dict[str, Any]:
    """First tokens of a checkpoint with empty caches and with full ones."""
    from benchmarks.engine.random_checkpoint import write_checkpoint

    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        write_checkpoint(Path(name) / "model", model)
        command = [*FIRST_TOKEN, "--model", f"{name}/model"]
        for run in range(runs + 1):
            caches = Path(name) / f"caches-{run}"
            places = {"TRITON_CACHE_DIR": f"{caches}/triton", "RAPID_DATA_DIR": f"{caches}/data"}
            took = {
                "import torch": seconds(IMPORT_TORCH),
                "first token, empty caches": seconds(command, **places),
                "first token, warm caches": seconds(command, **places),
            }
            print(f"{run} of {runs}:", ", ".join(f"{what} {value:.2f} s" for what, value in took.items()), flush=True)
            for what, value in took.items():
                times.setdefault(what, []).extend([value] if run else [])  # the first fills the page cache
            shutil.rmtree(caches)
    return {"model": model} | {what: summary(values) for what, values in times.items()}


def on_cpu(runs: int) -> dict[str, Any]:
    """The embedded model's first token, help, and a server, each next to `import torch`."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for run in range(runs + 1):
        for name, arguments in COMMANDS.items():
            took = seconds(arguments)
            if run:  # the first fills the page cache
                times[name].append(took)
        answered, ready = serving()
        if run:
            times.setdefault("server answers", []).append(answered)
            times.setdefault("server ready", []).append(ready)
    results = {name: summary(values) for name, values in times.items()}
    for name in ("first token", "help"):
        ratios = [value / torch for value, torch in zip(times[name], times["import torch"], strict=True)]
        results[f"{name} / import torch"] = summary(ratios)
    return results


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", help="a shape of random_checkpoint; needs a GPU")
    parser.add_argument("--folder", help="where its checkpoint is written for the run (default: the system's temporary folder)")
    options = parser.parse_args()
    results = on_gpu(options.model, options.folder, options.runs) if options.model else on_cpu(options.runs)
    for name, s in results.items():
        print(f"{name:<26} {s['median']:6.3f}  ({s['min']:.3f} to {s['max']:.3f})" if isinstance(s, dict) else f"{name:<26} {s}")
    print(f"written to {write('startup_cuda' if options.model else 'startup_cpu', results)}")


if __name__ == "__main__":
    main()
