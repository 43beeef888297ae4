"""How long from exec to the first token, to --help and to a server's first answer, next to `import torch` alone?

    python -m benchmarks.engine.bench_startup

Whole processes, in turn, page cache warm; each ratio is taken within a turn. The server is asked again and again: until it
answers at all (503, the engine is loading), and until it is ready.
"""

import argparse
import contextlib
import http.client
import socket
import subprocess
import sys
import time

from benchmarks.record import summary, write

FIRST_TOKEN = ["-m", "rapid_llm", "generate", "Once upon a time", "--max-tokens", "1", "--temperature", "0", "--device", "cpu"]
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "first token": FIRST_TOKEN,
    "help": ["-m", "rapid_llm", "--help"],
    "python alone": ["-c", "pass"],
}


def seconds(arguments: list[str]) -> float:
    """Wall time of one process; an error of it is an error here."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


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


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for run in range(options.runs + 1):
        for name, arguments in COMMANDS.items():
            took = seconds(arguments)
            if run:  # the first fills the page cache
                times[name].append(took)
        answered, ready = serving()
        if run:
            times.setdefault("server answers", []).append(answered)
            times.setdefault("server ready", []).append(ready)
    results = {name: summary(values) for name, values in times.items()}
    for name, s in results.items():
        print(f"{name:<14} {s['median']:6.3f} s  ({s['min']:.3f} to {s['max']:.3f})")
    for name in ("first token", "help"):
        ratios = [value / torch for value, torch in zip(times[name], times["import torch"], strict=True)]
        results[f"{name} / import torch"] = summary(ratios)
        print(f"{name} / import torch: {summary(ratios)['median']:.2f}  ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"written to {write('startup_cpu', results)}")


if __name__ == "__main__":
    main()
