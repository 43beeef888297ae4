"""Triton's hash of itself, kept from one start to the next.

Every look into Triton's cache begins with it, and the first of a process reads half a gigabyte for it: a third of a second.
"""

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rapid_llm.envs import data_folder
from rapid_llm.kernels.store import warn_once, write_whole


def keep_compiler_hash() -> None:
    """Let Triton take its hash from the user's data folder where its files are those of last time; else keep it there."""
    from triton.runtime import cache

    if not hasattr(cache, "triton_key"):  # a version that does this in another way
        return
    files, path = sorted(_files(), key=str), data_folder() / "compiler_hash.json"
    kept = _read(path, files)
    if kept is None:
        kept = cache.triton_key()
        _write(path, {"files": files, "hash": kept})
    cache.triton_key = lambda: kept


def _files() -> Iterator[list[object]]:
    """Every file of Triton's with its size and the time it was written."""
    spec = find_spec("triton")
    for root in spec.submodule_search_locations or () if spec is not None else ():
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in names:
                stat = os.stat(os.path.join(folder, name))
                yield [os.path.join(folder, name), stat.st_size, stat.st_mtime_ns]


def _read(path: Path, files: list[list[object]]) -> str | None:
    try:
        kept = json.loads(path.read_text())
        return str(kept["hash"]) if kept["files"] == files else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, content: dict[str, object]) -> None:
    try:
        write_whole(path, json.dumps(content).encode())
    except OSError as error:
        warn_once(f"{path} cannot be written ({error}); every start hashes Triton anew")
