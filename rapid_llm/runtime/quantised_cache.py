"""Weights that were quantised at an earlier start, kept on disk: the next start with the same request reads their bytes.

An entry is a folder, ``NAME-KIND-HASH``, of safetensors files with the packed tensors of every layer, and of ``entry.json``,
which says what was asked for: which files of which checkpoint, to which format, by which code. Tensors lie as the ops of every
device read them, so an entry is of no device. It is written beside its place and renamed there whole, so that of two processes
one wins and both are right. One that is stale or damaged costs a warning and is written anew; where it cannot be written, or
there is no room, a warning says so and the start goes on. Damage is told by sizes and headers; a bit that a disk turns is not.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rapid_llm import quantization
from rapid_llm.checkpoint.file_reader import TensorFiles
from rapid_llm.checkpoint.safetensors import read_header
from rapid_llm.checkpoint.source import CheckpointSource, TensorInfo
from rapid_llm.envs import data_folder, environment
from rapid_llm.errors import CheckpointError
from rapid_llm.kernels.store import warn_once
from rapid_llm.quantization.formats import Formats, Read, WeightFormat
from rapid_llm.quantization.packed import Packed, Place
from rapid_llm.runtime.weight_loader import LoadReport, load_weights
from rapid_llm.weights import WeightSlot

FORMAT = 1
"""Of an entry. Tensors of another one are not read."""
ENTRY_FILE = "entry.json"
FILE_BYTES = 1 << 30
"""Of one file, unless a tensor is larger: what is held on the host while it is written."""
ROOM_LEFT = 1 << 30
"""Bytes of the disk that an entry leaves free."""

_ROUNDING = ("online", "packed", "nvfp4", "fp8", "w8a8")  # modules of rapid_llm.quantization whose code makes the bytes
_SNAPSHOT = re.compile(r"(models--[^/]+)/snapshots/([0-9a-f]{40})(?:/|$)")
_ABANDONED_S = 86_400.0  # age of a folder that its writer has left behind

Progress = Callable[[int, int, float], None]


class KeptFormats:
    """Formats whose layers remember their weights, so that these can be written, and can be read as they were written.

    Attributes:
        parts: the weight of each checkpoint layer, once its slots were asked for.
        as_written: whether slots are those of an entry, in place of the checkpoint's.
    """

    def __init__(self, formats: Formats) -> None:
        self._formats = formats
        self.parts: dict[str, Packed] = {}
        self.as_written = False

    def of(self, names: Sequence[str], k: int) -> WeightFormat | None:
        """See Formats."""
        kept = self._formats.of(names, k)
        return None if kept is None else _KeptFormat(kept, self)


@dataclass(frozen=True)
class _KeptFormat:
    """One layer's format, as KeptFormats has it. See WeightFormat."""

    inner: WeightFormat
    owner: KeptFormats

    @property
    def kind(self) -> str:
        return self.inner.kind

    def empty(self, place: Place, n: int, k: int, *, experts: int | None = None) -> Packed:
        return self.inner.empty(place, n, k, experts=experts)

    def slots(self, name: str, part: Packed) -> Iterator[WeightSlot]:
        self.owner.parts[name] = part
        if self.owner.as_written:
            for tensor, values in part.tensors.items():
                yield WeightSlot(f"{name}.{tensor}", values, (str(values.dtype).removeprefix("torch."),))
        else:
            yield from self.inner.slots(name, part)

    def dequantised(self, read: Read, name: str) -> torch.Tensor:
        return self.inner.dequantised(read, name)


class QuantisedCache:
    """The entry of one checkpoint in one format.

    Attributes:
        folder: where it is or will be; None where ``RAPID_QUANTIZE_CACHE`` is "off".
        request: what entry.json must say for it to be used.
    """

    def __init__(self, source: CheckpointSource, kind: str) -> None:
        self._source, self._kind = source, kind
        self.request: dict[str, Any] = {"checkpoint": _identity(source), "kind": kind, "code": _code_hash()}
        digest = hashlib.sha256(json.dumps([FORMAT, self.request], sort_keys=True).encode()).hexdigest()
        root = _root()
        self.folder = None if root is None else root / f"{source.path.stem[:40]}-{kind}-{digest[:16]}"

    @property
    def is_there(self) -> bool:
        """Whether there is an entry, sound or not."""
        return self.folder is not None and self.folder.exists()

    def open(self) -> CheckpointSource | None:
        """The checkpoint with the entry's tensors in place of those they were made of; None, after a warning, if unsound."""
        if self.folder is None:
            return None
        try:
            return _WithEntry(self._source, self._entry(self.folder))
        except (OSError, ValueError, CheckpointError) as error:
            self.discard(str(error))
            return None

    def discard(self, why: str) -> None:
        """Warn and take the entry away, so that it is written anew."""
        warn_once(f"{self.folder} cannot be used ({why}); the weights are quantised anew")
        if self.folder is not None:
            with contextlib.suppress(OSError):  # gone already, or for good: then writing will say so
                aside = Path(tempfile.mkdtemp(dir=self.folder.parent, prefix=f".{self.folder.name}."))
                os.replace(self.folder, aside)
                shutil.rmtree(aside, ignore_errors=True)

    def write(self, parts: Mapping[str, Packed]) -> str:
        """Write the entry. What is said of it in the ledger; a disk that is full or may not be written costs a warning."""
        from safetensors import SafetensorError

        if self.folder is None:
            return f"weights quantised to {self._kind}; RAPID_QUANTIZE_CACHE is off, so the next start does it again"
        tensors = {f"{name}.{tensor}": values for name, part in parts.items() for tensor, values in part.tensors.items()}
        size = sum(values.nbytes for values in tensors.values())
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._check_room(size)
            self._write(self.folder, tensors)
        except (OSError, SafetensorError) as error:  # the package gives the system's errors as its own
            warn_once(f"quantised weights cannot be kept in {self.folder} ({error}); the next start makes them again")
            return f"weights quantised to {self._kind}, not kept"
        with contextlib.suppress(OSError):  # of other processes that do the same
            self._remove_older(self.folder)
        return f"weights quantised to {self._kind}, {size / 1e6:,.1f} MB kept in {self.folder} for the next start"

    def _entry(self, folder: Path) -> list[Path]:
        """The files of an entry. Raises: OSError, ValueError or CheckpointError unless it is whole and what was asked for."""
        entry = json.loads((folder / ENTRY_FILE).read_text(encoding="utf-8"))
        if not isinstance(entry, dict) or entry.get("format") != FORMAT or entry.get("request") != self.request:
            raise ValueError("it is of another checkpoint, format or version")
        files = entry.get("files")
        if not isinstance(files, dict) or not files:
            raise ValueError("it names no files")
        for name, size in files.items():
            if Path(name).name != name or (folder / name).stat().st_size != size:
                raise ValueError(f"{name} is not as it was written")
        return [folder / name for name in files]

    def _check_room(self, size: int) -> None:
        """Raises: OSError where the disk has no room for so many bytes and some more."""
        if self.folder is not None and (free := shutil.disk_usage(self.folder.parent).free) < size + ROOM_LEFT:
            raise OSError(f"{size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free, of which {ROOM_LEFT / 1e9:.2f} are left")

    def _write(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            files = {}
            for number, names in enumerate(_files_of(tensors)):
                path = beside / f"packed-{number + 1:05d}.safetensors"
                save_file({name: tensors[name].cpu().contiguous() for name in names}, path)
                files[path.name] = path.stat().st_size
            content = {"format": FORMAT, "request": self.request, "files": files}
            (beside / ENTRY_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            try:
                os.rename(beside, folder)
            except OSError:
                if not folder.exists():  # else another process has written the same
                    raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _remove_older(self, folder: Path) -> None:
        """Take away entries that this one replaces: of the same checkpoint, since changed, or by older code; and what a process
        that was killed has left half written.
        """
        now = time.time()
        for other in folder.parent.iterdir():
            if other == folder:
                continue
            if other.name.startswith("."):
                if now - other.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(other, ignore_errors=True)
                continue
            with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
                theirs = json.loads((other / ENTRY_FILE).read_text(encoding="utf-8"))["request"]
                if _subject(theirs) == _subject(self.request):
                    shutil.rmtree(other, ignore_errors=True)


def load_quantised(
    source: CheckpointSource,
    slots: Callable[[], Iterator[WeightSlot]],
    formats: KeptFormats,
    kept: QuantisedCache,
    progress: Progress | None = None,
) -> LoadReport | None:
    """Fill a model from its entry; None where there is none that can be used.

    Args:
        source: the open checkpoint, which has the tensors that no format packs.
        slots: every place of the model, as ``formats`` has them when it is called.
        formats: of the model's layers.
        kept: the entry.
        progress: see load_weights.
    """
    entry = kept.open()
    if entry is None:
        return None
    formats.as_written = True
    try:
        return load_weights(entry, slots(), progress)
    except CheckpointError as error:
        kept.discard(str(error))
        return None
    finally:
        formats.as_written = False
        entry.close()


class _WithEntry:
    """A checkpoint whose packed layers come from an entry. See CheckpointSource; closing it leaves the checkpoint open."""

    def __init__(self, source: CheckpointSource, files: Sequence[Path]) -> None:
        self._source, self._files = source, TensorFiles()
        self.path, self.config, self.generation = source.path, source.config, source.generation
        self.tokenizer_source = source.tokenizer_source
        try:
            self._mine = {info.name: info for path in files for info in read_header(self._files.open(path))}
        except CheckpointError:
            self._files.close()
            raise
        self._paths = frozenset(files)
        others = {name: info for name, info in source.tensors.items() if name not in self._mine}
        self.tensors: dict[str, TensorInfo] = others | self._mine

    def read(self, name: str) -> NDArray[Any]:
        return self._files.raw(self._mine[name]) if name in self._mine else self._source.read(name)

    def kv_scales(self) -> dict[str, NDArray[Any]]:
        return self._source.kv_scales()

    def fill(self, file: Path, offset: int, buffer: NDArray[np.uint8]) -> None:
        (self._files if file in self._paths else self._source).fill(file, offset, buffer)

    def decode(self, name: str, raw: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[Any]:
        return self._source.decode(name, raw, shape)  # an entry's tensors are plain: nobody asks

    def rows(self, name: str, raw: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
        return self._source.rows(name, raw, count)

    def close(self) -> None:
        self._files.close()


def _root() -> Path | None:
    chosen = environment().quantize_cache
    if chosen == "off":
        return None
    return data_folder() / "quantised" if chosen is None else Path(chosen)


def _identity(source: CheckpointSource) -> dict[str, Any]:
    """What tells a checkpoint from others, and from itself once changed: the hub's commit, or path, sizes and times of files."""
    files = sorted({info.file for info in source.tensors.values()})
    config = source.path / "config.json"
    files += [config] if config.exists() else []
    found = _SNAPSHOT.search(f"{source.path.absolute().as_posix()}/")
    names = [file.name for file in files]
    if found:
        return {"where": f"{found[1]}@{found[2]}", "files": names}
    stamps = [[stat.st_size, stat.st_mtime_ns] for stat in (file.stat() for file in files)]
    return {"where": str(source.path.resolve()), "files": names, "stamps": stamps}


def _subject(request: dict[str, Any]) -> list[Any]:
    """What a request is about, whatever state that is in."""
    return [request["kind"], request["checkpoint"]["where"], request["checkpoint"]["files"]]


@cache
def _code_hash() -> str:
    """Of the code that rounds: an entry of other code is stale."""
    folder = Path(quantization.__file__).parent
    return hashlib.sha256(b"".join((folder / f"{name}.py").read_bytes() for name in _ROUNDING)).hexdigest()[:16]


def _files_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names of the tensors of each file, in order."""
    names: list[str] = []
    size = 0
    for name, values in tensors.items():
        if names and size + values.nbytes > FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += values.nbytes
    if names:
        yield names
