"""``python -m rapid_llm.entrypoints.compile_process``: compiles what an engine will launch, on every core and without a GPU.

Standard input describes the engine (see compile_ahead.py). It is built on tensors without memory, it makes its launches, and what
each needs is compiled into Triton's cache by forked processes meanwhile. Standard output gets a line of JSON for each kernel
done, and at the end a note. This process never touches a GPU, and forks before it has a second thread.
"""

import base64
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.kernels.device import DeviceInfo, probe_device
from rapid_llm.kernels.store import write_whole


def main() -> int:
    """Read, rehearse, compile, list; return the exit status."""
    sys.excepthook = lambda kind, error, _: _say(note=f"kernels were not compiled ahead: {kind.__name__}: {error}"[:200])
    told = json.load(sys.stdin)
    device = probe_device()
    if device.type != "cuda":
        _say(note="kernels were not compiled ahead: nvidia-smi names no GPU")
        return 0
    started = time.perf_counter()
    names = list(_compile_all(EngineConfig(**told["config"]), Path(told["path"]), device))
    if all(names):
        with suppress(OSError):  # the next start looks for them again
            write_whole(Path(told["launches"]), json.dumps({"kernels": names}).encode())
    _say(note=f"{len(list(filter(None, names)))} kernels compiled ahead, or found, in {time.perf_counter() - started:.1f} s")
    return 0


def _compile_all(config: EngineConfig, path: Path, device: DeviceInfo) -> Iterator[str]:
    """Rehearse, and have what a launch needs compiled as soon as it is known.

    Yields: the name of each kernel in Triton's cache, or nothing where it does not compile: its launch will tell why.
    """
    import torch

    from rapid_llm.build import launch_everything
    from rapid_llm.kernels.jit.compiler_hash import keep_compiler_hash
    from rapid_llm.kernels.rehearsal import Kernel, build_driver, rehearse

    keep_compiler_hash()
    compiled: list[Future[str]] = []
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        pool.submit(_unless_impossible, build_driver)  # with the first task all workers are forked

        def needed(kernel: Kernel) -> None:
            compiled.append(pool.submit(_compile, kernel))

        try:
            with torch.inference_mode(), rehearse(device, needed):
                launch_everything(config, open_checkpoint(path), device)
        except RuntimeError:  # a row in plain torch that looks at values, which are not there
            yield ""  # so not all of it is known
        for done, each in enumerate(compiled, 1):
            yield "" if each.exception() else each.result()
            _say(done=done, of=len(compiled))


def _compile(kernel: Any) -> str:
    from rapid_llm.kernels.rehearsal import build_launcher

    compiled = kernel.compile()
    _unless_impossible(build_launcher, compiled)
    return base64.b32encode(bytes.fromhex(compiled.hash)).decode().rstrip("=")


def _unless_impossible(build: Callable[..., None], *args: Any) -> None:
    """Without driver or C compiler it is; the first launch will say so."""
    with suppress(AssertionError, RuntimeError, subprocess.CalledProcessError):
        build(*args)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
