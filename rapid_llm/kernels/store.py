"""The JSON files that evidence and tuned tiles are kept in: one a device, shipped in the package or in the user's data folder.

A file that cannot be read costs its contents, never the start: one warning that names it, then it counts as absent.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rapid_llm.envs import data_folder
from rapid_llm.errors import ConfigError

FORMAT = 1
_FIELDS = frozenset(("format", "device", "entries"))
Kind = Literal["evidence", "tuned"]


class StoreWarning(UserWarning):
    """A store file or entry that was ignored. The text names it and says why."""


@dataclass(frozen=True)
class StoreFile:
    """One readable file.

    Attributes:
        path: where it lies.
        origin: "user" or "shipped".
        device: the device its entries were taken on.
        entries: its JSON objects as they stand; whoever owns the kind checks them.
    """

    path: Path
    origin: Literal["user", "shipped"]
    device: str
    entries: tuple[dict[str, Any], ...]


def shipped_folder(kind: Kind) -> Path:
    """The folder of the package that holds ``<device>.json`` files."""
    return Path(__file__).parent / kind


def user_folder(kind: Kind) -> Path:
    """The folder of the user's own files; it need not exist."""
    return data_folder() / kind


def read_stores(kind: Kind) -> tuple[StoreFile, ...]:
    """Every readable file of a kind, the user's first, then the shipped ones; by device name within each."""
    folders: tuple[tuple[Literal["user", "shipped"], Path], ...] = (
        ("user", user_folder(kind)),
        ("shipped", shipped_folder(kind)),
    )
    found = []
    for origin, folder in folders:
        for path in sorted(folder.glob("*.json")):
            entries = read_entries(path)
            if entries is not None:
                found.append(StoreFile(path, origin, path.stem, entries))
    return tuple(found)


def read_entries(path: Path) -> tuple[dict[str, Any], ...] | None:
    """The entries of one file; None, after one warning, when it is not a store file that this version reads."""
    try:
        stamp = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:  # a link to itself, a folder that may not be entered
        warn_once(f"{path} cannot be read ({error}); it is ignored")
        return None
    return _read(path, stamp.st_mtime_ns, stamp.st_size)


@cache
def _read(path: Path, modified_ns: int, size: int) -> tuple[dict[str, Any], ...] | None:
    """Cached by modification time and size: a file is parsed, and complained about, once."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        _ignore(path, f"cannot be read ({error})")
        return None
    if not isinstance(content, dict) or "format" not in content:
        _ignore(path, "is not a store file")
        return None
    if content["format"] != FORMAT:
        _ignore(path, f"has format {content['format']!r}, this version reads {FORMAT}")
        return None
    unknown = sorted(set(content) - _FIELDS)
    if unknown:
        _ignore(path, f"has fields that this version does not know ({', '.join(unknown)})")
        return None
    entries = content.get("entries")
    if (
        content.get("device") != path.stem
        or not isinstance(entries, list)
        or not all(isinstance(entry, dict) for entry in entries)
    ):
        _ignore(path, f"does not hold entries of the device {path.stem!r}")
        return None
    return tuple(entries)


def _ignore(path: Path, why: str) -> None:
    warnings.warn(f"{path} {why}; it is ignored", StoreWarning, stacklevel=2)


@cache
def warn_once(message: str) -> None:
    """Warn of an entry that is ignored, once a process, however many look-ups meet it."""
    warnings.warn(message, StoreWarning, stacklevel=3)


def write_user_store(kind: Kind, device: str, entries: Sequence[dict[str, Any]]) -> Path:
    """Write the user's file of a device whole, or leave the old one as it was. An unreadable old file is kept beside it.

    Raises: ConfigError when the folder cannot be written.
    """
    path = user_folder(kind) / f"{device}.json"
    text = json.dumps({"format": FORMAT, "device": device, "entries": list(entries)}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and read_entries(path) is None:
            os.replace(path, path.with_suffix(".json.ignored"))
        write_whole(path, text.encode())
    except OSError as error:
        change = "make it writable or set RAPID_DATA_DIR to a folder that is"
        raise ConfigError(f"cannot write {path}", got=str(error), wanted="a writable data folder", change=change) from error
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file and, where it is missing, its folder, or leave the old one as it was: nobody reads half of it.

    Raises: OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
