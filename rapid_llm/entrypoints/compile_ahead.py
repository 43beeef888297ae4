"""Kernels that a start will need and Triton's cache lacks are compiled by other processes, while this one imports and loads.

A start that finds everything in the cache starts no process: what the last one with the same model, settings, sources and
versions has launched is listed in ``launches/`` of the user's data folder, by name in the cache. Torch-free.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rapid_llm.config import EngineConfig
from rapid_llm.envs import data_folder
from rapid_llm.ledger import StartupLedger

_COMMAND = (sys.executable, "-m", "rapid_llm.entrypoints.compile_process")
_PACKAGE = Path(__file__).parents[1]
_READ_BY_COMPILERS = ("TRITON_", "RAPID_", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")

Progress = Callable[[int, int], None]
"""Called with kernels done and kernels in all."""


class CompileAhead:
    """The processes of one start, if it needs any.

    Args:
        config: the engine's.
        path: where its model lies.
        ledger: where waiting for them is noted.
    """

    def __init__(self, config: EngineConfig, path: Path, ledger: StartupLedger) -> None:
        self._ledger = ledger
        self._process: subprocess.Popen[str] | None = None
        if not may_use_gpu(config) or os.environ.get("TRITON_INTERPRET", "0") == "1":
            return
        with ledger.phase("look for kernels"):
            launches = data_folder() / "launches" / f"{_key(config, path)}.json"
            listed = _listed(launches)
            if not listed or not all((cache_folder() / name).is_dir() for name in listed):
                told = json.dumps({"config": asdict(config), "path": str(path), "launches": str(launches)})
                self._process = _start(told)

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with self._process:
                os.killpg(self._process.pid, signal.SIGKILL)  # and those that it has forked

    def wait(self, progress: Progress | None = None) -> None:
        """Return once everything is in the cache, or cannot be brought there: then the launch itself will say why."""
        if self._process is None:
            return
        told: dict[str, Any] = {}
        with self._ledger.phase("wait for compilers"):
            for line in self._process.stdout or ():
                told = json.loads(line)
                if "note" in told:
                    break
                if progress is not None:
                    progress(told["done"], told["of"])
        self._ledger.note(told.get("note", "kernels were not compiled ahead: the process that does it has ended"))


def _start(told: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(told)
    return process


def cache_folder() -> Path:
    """Triton's, as Triton finds it."""
    chosen = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
    return Path(chosen or os.path.join(home, ".triton", "cache"))


def may_use_gpu(config: EngineConfig) -> bool:
    """Whether the engine will be on a GPU, as far as can be told without asking a driver."""
    if config.device is not None and not config.device.startswith("cuda"):
        return False
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not hidden and Path("/dev/nvidiactl").exists()


def _listed(launches: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return [str(name) for name in json.loads(launches.read_text())["kernels"]]
    return []


def _key(config: EngineConfig, path: Path) -> str:
    """Of everything that decides what is launched, and how it is compiled; files by their sizes and times."""
    parts = {
        "config": asdict(config),
        "python": sys.version,
        "variables": sorted(item for item in os.environ.items() if item[0].startswith(_READ_BY_COMPILERS)),
        "devices": sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*")),
        "files": list(_files(path)),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    model = [path / "config.json"] if path.is_dir() else [path]
    stores = [file for kind in ("evidence", "tuned") for file in (data_folder() / kind).glob("*.json")]
    packages = [_package_file(name) for name in ("torch", "triton")]  # written anew by whatever installs another version
    for file in [*model, *packages, *sorted(stores), *sorted(_PACKAGE.rglob("*.py")), *sorted(_PACKAGE.rglob("*.json"))]:
        with contextlib.suppress(OSError):
            stat = file.stat()
            yield str(file), stat.st_size, stat.st_mtime_ns


def _package_file(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin if spec is not None and spec.origin else package)
