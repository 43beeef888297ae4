"""``python -m rapid_llm.entrypoints.compile_process``: compiles what an engine will launch, on every core and without a GPU.

Standard input describes the engine (see compile_ahead.py). It is built on tensors without memory, its launches are noted, and
what they need is compiled into Triton's cache by forked processes. Standard output gets a line of JSON for each kernel done, and
at the end a note. This process never touches a GPU and has no second thread, so that it may fork.
"""

import base64
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.kernels.device import DeviceInfo, probe_device

_kernels: list[Any] = []
"""What the forked processes inherit, to be named by its place."""


def main() -> int:
    """Read, rehearse, compile, list; return the exit status."""
    sys.excepthook = lambda kind, error, _: _say(note=f"kernels were not compiled ahead: {kind.__name__}: {error}"[:200])
    told = json.load(sys.stdin)
    device = probe_device()
    if device.type != "cuda":
        _say(note="kernels were not compiled ahead: nvidia-smi names no GPU")
        return 0
    started = time.perf_counter()
    _kernels.extend(_rehearsed(EngineConfig(**told["config"]), Path(told["path"]), device))
    rehearsed = time.perf_counter()
    names = list(_compile_all())
    took = time.perf_counter() - rehearsed
    _say(note=f"{len(names)} kernels compiled ahead or found, {took:.1f} s after {rehearsed - started:.1f} s of rehearsal")
    if all(names):
        launches = Path(told["launches"])
        launches.parent.mkdir(parents=True, exist_ok=True)
        launches.write_text(json.dumps({"kernels": names}))
    return 0


def _rehearsed(config: EngineConfig, path: Path, device: DeviceInfo) -> list[Any]:
    """The kernels that an engine launches, in the order in which it will."""
    import torch

    from rapid_llm.build import launch_everything
    from rapid_llm.kernels.jit.rehearsal import rehearse

    with torch.inference_mode(), rehearse(device) as kernels:
        launch_everything(config, open_checkpoint(path), device)
    return kernels


def _compile_all() -> Iterator[str]:
    """The name of each kernel in Triton's cache, or nothing where it does not compile: its launch will tell why."""
    workers = max(1, min(len(_kernels), len(os.sched_getaffinity(0)) - 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        pool.submit(_build_driver)
        compiled = [pool.submit(_compile, place) for place in range(len(_kernels))]
        for done, each in enumerate(compiled, 1):
            yield "" if each.exception() else each.result()
            _say(done=done, of=len(_kernels))


_NO_C = (AssertionError, RuntimeError, subprocess.CalledProcessError)  # without driver or C compiler; the first launch says so


def _build_driver() -> None:
    from rapid_llm.kernels.jit.rehearsal import build_driver

    with suppress(*_NO_C):
        build_driver()


def _compile(place: int) -> str:
    from rapid_llm.kernels.jit.rehearsal import build_launcher

    compiled = _kernels[place].compile()
    with suppress(*_NO_C):
        build_launcher(compiled)
    return base64.b32encode(bytes.fromhex(compiled.hash)).decode().rstrip("=")


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
