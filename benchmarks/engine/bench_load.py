"""How fast do weights get from files to the device, next to reading the files and to the transfer alone?

    python -m benchmarks.engine.bench_load [--gb 8] [--device cuda]

A folder of random bf16 matrices in the shapes of an 8B model, page cache warm (the first load fills it) and once
cold. The two floors move the same bytes with as many threads: files into host buffers and nothing more; pinned host memory to the
device. Peak host memory is the growth of the resident set over the load.
"""

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine.random_checkpoint import write_checkpoint
from benchmarks.record import summary, write
from rapid_llm.checkpoint.file_reader import FileReader
from rapid_llm.checkpoint.safetensors import SafetensorsCheckpoint
from rapid_llm.runtime.staging import MAX_THREADS, PIECE_BYTES, place_pieces, plan_pieces

LAYER_BYTES = 436e6  # of the 8B model
RUNS = 5


def drop_cache(folder: Path) -> None:
    """Ask the system to forget the files, so that the next read comes from the disk."""
    for file in folder.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_only(folder: Path, threads: int) -> None:
    """The floor of reading: the same pieces of the same files into buffers."""
    readers = [FileReader(file) for file in sorted(folder.glob("*.safetensors"))]
    jobs = [
        (reader, start, min(PIECE_BYTES, reader.size - start))
        for reader in readers
        for start in range(0, reader.size, PIECE_BYTES)
    ]
    buffers = [np.zeros(PIECE_BYTES, np.uint8) for _ in range(threads)]

    def run(worker: int) -> None:
        for reader, start, length in jobs[worker::threads]:
            reader.fill(start, buffers[worker][:length])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))
    for reader in readers:
        reader.close()


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Wall time until the device is done."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def load(folder: Path, targets: dict[str, torch.Tensor], threads: int) -> None:
    """What the engine does, from the open checkpoint on."""
    source = SafetensorsCheckpoint(folder)
    for _ in place_pieces(source, plan_pieces(source.tensors.values()), targets, threads=threads):
        pass
    source.close()


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", help="where the files are written for the run (default: the system's temporary folder)")
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write_checkpoint(folder, "llama-8b", layers=max(1, round(options.gb * 1e9 / LAYER_BYTES)))
        source = SafetensorsCheckpoint(folder)
        total = sum(info.nbytes for info in source.tensors.values())
        targets = {name: torch.zeros(info.shape, dtype=torch.bfloat16, device=device) for name, info in source.tensors.items()}
        source.close()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        load(folder, targets, MAX_THREADS)
        results: dict[str, object] = {"GB": total / 1e9, "device": options.device}
        results["peak host memory, MB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
        drop_cache(folder)
        results["load, files forgotten, GB/s"] = total / 1e9 / seconds(lambda: load(folder, targets, MAX_THREADS), device)
        rates: dict[str, list[float]] = {}
        for _ in range(RUNS):
            for threads in (1, 2, 4, 8):
                took = seconds(lambda n=threads: load(folder, targets, n), device)  # type: ignore[misc]
                rates.setdefault(f"load, {threads} threads, GB/s", []).append(total / 1e9 / took)
                took = seconds(lambda n=threads: read_only(folder, n), device)  # type: ignore[misc]
                rates.setdefault(f"read alone, {threads} threads, GB/s", []).append(total / 1e9 / took)
            if device.type == "cuda":
                rates.setdefault("transfer alone, GB/s", []).append(_transfer_rate(device))
    results |= {name: summary(values) for name, values in rates.items()}
    for name, value in results.items():
        text = f"{value['median']:.2f} ({value['min']:.2f} to {value['max']:.2f})" if isinstance(value, dict) else str(value)
        print(f"{name:<34} {text}")
    print(f"written to {write(f'load_{device.type}', results)}")


def _transfer_rate(device: torch.device) -> float:
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    return host.nbytes / 1e9 / seconds(lambda: there.copy_(host, non_blocking=True), device)


if __name__ == "__main__":
    main()
