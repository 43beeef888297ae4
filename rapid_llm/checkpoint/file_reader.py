"""Reading of tensor data: large sequential windows in file order, so that in-order readers read each byte once.

Network storage answers small random reads (what a memory map makes of a load) a hundred times slower than large sequential ones.
"""

import os
import threading
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rapid_llm.checkpoint.source import TensorInfo
from rapid_llm.errors import CheckpointError

WINDOW_BYTES = 32 << 20
"""Bytes of one read, unless a tensor is larger or the file ends."""


def read_range(fd: int, offset: int, target: memoryview) -> int:
    """Read into ``target`` from byte ``offset`` on; returns how many bytes came. Every byte of tensor data passes here."""
    return os.preadv(fd, [target], offset)


class FileReader:
    """Byte ranges of one file, served from a window that moves forward and carries over what it already holds.

    Attributes:
        path: the file.
        size: its bytes when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
            self.size = os.fstat(self._fd).st_size
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be opened", got=str(error.strerror), change="check the path and its rights"
            ) from error
        self._closing = weakref.finalize(self, os.close, self._fd)
        self._lock = threading.Lock()
        self._window: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._start = 0

    def view(self, start: int, nbytes: int, *, ahead: int = WINDOW_BYTES) -> NDArray[np.uint8]:
        """Bytes ``start : start + nbytes`` as a writable view. Where they are not at hand, ``ahead`` bytes are read in one go.

        Raises:
            CheckpointError: the range passes the end of the file, or the file cannot be read.
        """
        self._check_range(start, nbytes)
        with self._lock:
            if not self._start <= start <= start + nbytes <= self._start + len(self._window):
                self._move_window(start, min(max(nbytes, ahead), self.size - start))
            return self._window[start - self._start : start - self._start + nbytes]

    def fill(self, offset: int, target: NDArray[np.uint8]) -> None:
        """Fill ``target`` with the bytes from ``offset`` on, past the window. Several threads may do so at once.

        Raises:
            CheckpointError: as ``view``.
        """
        self._check_range(offset, len(target))
        self._fill(target, offset)

    def release(self) -> None:
        """Drop the window; views of it stay valid."""
        with self._lock:
            self._window = np.empty(0, np.uint8)

    def close(self) -> None:
        """Close the file and drop the window."""
        self.release()
        self._closing()
        self._fd = -1  # the number may come back as another file's

    def _check_range(self, start: int, nbytes: int) -> None:
        if start < 0 or start + nbytes > self.size:
            got, wanted = f"{self.size:,} bytes", f"{start + nbytes:,}"
            raise CheckpointError(f"{self.path} is truncated", got=got, wanted=wanted, change="fetch the file again")

    def _move_window(self, start: int, length: int) -> None:
        window = np.empty(length, np.uint8)
        held = self._window[start - self._start :] if self._start <= start else self._window[:0]
        window[: len(held)] = held
        self._fill(window[len(held) :], start + len(held))
        self._window, self._start = window, start

    def _fill(self, target: NDArray[np.uint8], offset: int) -> None:
        rest = target.data
        while rest:
            try:
                count = read_range(self._fd, offset, rest)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be read", got=str(error.strerror), change="check the storage"
                ) from error
            if count == 0:
                got = f"its end at byte {offset:,}"
                raise CheckpointError(f"{self.path} was cut while it was read", got=got, change="fetch the file again")
            rest, offset = rest[count:], offset + count


class TensorFiles:
    """The files of one checkpoint. Only the file that was read last keeps a window: moving to the next shard frees it."""

    def __init__(self) -> None:
        self._readers: dict[Path, FileReader] = {}
        self._last: FileReader | None = None

    def open(self, path: Path) -> FileReader:
        """The reader of ``path``, opened on first use."""
        if path not in self._readers:
            self._readers[path] = FileReader(path)
        return self._readers[path]

    def raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The bytes of a tensor as they stand in its file."""
        reader = self.open(info.file)
        if self._last is not None and self._last is not reader:
            self._last.release()
        self._last = reader
        return reader.view(info.offset, info.nbytes)

    def fill(self, path: Path, offset: int, target: NDArray[np.uint8]) -> None:
        """Bytes of an open file from ``offset`` on, whatever the windows hold. Several threads may ask at once."""
        self._readers[path].fill(offset, target)

    def close(self) -> None:
        """Close every file."""
        for reader in self._readers.values():
            reader.close()
