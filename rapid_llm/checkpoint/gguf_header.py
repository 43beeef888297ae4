"""The header of a GGUF file, versions 2 and 3: metadata and tensor table. Every count is bounded by the bytes that are left.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (MIT). The reader of the ``gguf`` package makes a numpy array of
each of some 100,000 strings and takes two seconds for a small model; it serves as the oracle in tests.
"""

import math
import struct
from array import array
from dataclasses import dataclass
from typing import Any

from rapid_llm.checkpoint.file_reader import FileReader
from rapid_llm.errors import CheckpointError

FIRST_READ = 4 << 20
MAX_HEADER = 512 << 20
"""A header longer than this is taken for a corrupt one: 300,000 tokens and their merges take 12 MB."""

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    code: struct.Struct("<" + letter) for code, letter in zip((0, 1, 2, 3, 4, 5, 6, 10, 11, 12), "BbHhIifQqd", strict=True)
}
_SCALARS[_BOOL] = struct.Struct("<B")
_ARRAY_CODES = {code: form.format[1:] for code, form in _SCALARS.items()}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_SMALLEST_ENTRY = 8 + 4 + 1  # a key's length, a type, one byte
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
_MAX_DIMS = 4


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table: ggml type by number, shape outermost first, offset from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (strings, numbers, lists of strings, arrays of numbers), tensor table, first byte of the tensor data."""

    metadata: dict[str, Any]
    tensors: list[GgufTensor]
    data_start: int


def read_gguf_header(reader: FileReader) -> GgufHeader:
    """Parse the header, reading as far as it goes.

    Raises:
        CheckpointError: no GGUF file, another version or byte order, or a header that does not parse.
    """
    length = min(FIRST_READ, reader.size)
    while True:
        data = reader.view(0, length, ahead=length).tobytes()
        try:
            return _parse(_Cursor(data, reader))
        except _HeaderGoesOn as more:
            length = min(max(4 * length, more.args[0]), MAX_HEADER, reader.size)
            if more.args[0] > MAX_HEADER:
                got, wanted = f"more than {MAX_HEADER:,} bytes of it", "a header of some megabytes"
                raise CheckpointError(
                    f"{reader.path}: the header is corrupt", got=got, wanted=wanted, change="fetch it again"
                ) from None


class _HeaderGoesOn(Exception):  # noqa: N818 - a signal to read on, not an error
    """The header ends past the bytes that were read; carries how many are needed at least."""


class _Cursor:
    """A position in the header. Past the bytes at hand it asks for more; past the end of the file it calls the header corrupt."""

    def __init__(self, data: bytes, reader: FileReader) -> None:
        self.data, self.file, self.file_size, self.at = data, reader.path, reader.size, 0

    def corrupt(self, what: str, got: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file}: {what} is corrupt", got=str(got)[:120], wanted=wanted, change="fetch the file again"
        )

    def require(self, end: int) -> None:
        """Make sure that the bytes up to ``end`` are at hand."""
        if end > self.file_size:
            raise self.corrupt("the header", f"one that passes byte {end:,}", f"at most {self.file_size:,}, the size of the file")
        if end > len(self.data):
            raise _HeaderGoesOn(end)

    def number(self, form: struct.Struct) -> Any:
        start, self.at = self.at, self.at + form.size
        self.require(self.at)
        return form.unpack_from(self.data, start)[0]

    def count(self, what: str, smallest: int) -> int:
        """A 64-bit count of items that take at least ``smallest`` bytes each."""
        count = int(self.number(_U64))
        if count * smallest > self.file_size - self.at:
            raise self.corrupt(f"the number of {what}", f"{count:,}", f"at most {(self.file_size - self.at) // smallest:,}")
        return count

    def text(self, what: str) -> str:
        return self.texts(1, what)[0]

    def texts(self, count: int, what: str) -> list[str]:
        """``count`` strings in a row. Called for some 100,000 of them on start-up, hence the local names."""
        data, size, at, unpack, out = self.data, len(self.data), self.at, _U64.unpack_from, []
        try:
            for _ in range(count):
                start = at + 8
                if start > size:
                    self.require(start)
                at = start + unpack(data, at)[0]
                if at > size:
                    self.require(at)
                out.append(data[start:at].decode())
        except UnicodeDecodeError as error:
            raise self.corrupt(f"the text of {what}", error.reason, "UTF-8") from error
        self.at = at
        return out

    def value(self, type_id: int, key: str) -> Any:
        """A value of metadata; arrays of numbers come as array.array."""
        if type_id == _STRING:
            return self.text(key)
        if type_id == _ARRAY:
            return self.array(key)
        if type_id not in _SCALARS:
            raise self.corrupt(f"the type of key {key!r}", type_id, "0 to 12")
        value = self.number(_SCALARS[type_id])
        return bool(value) if type_id == _BOOL else value

    def array(self, key: str) -> Any:
        type_id = self.number(_U32)
        if type_id == _STRING:
            return self.texts(self.count(f"entries of {key!r}", 8), key)
        if type_id not in _ARRAY_CODES:
            raise self.corrupt(f"the element type of key {key!r}", type_id, "a number or a string")
        numbers = array(_ARRAY_CODES[type_id])
        count = self.count(f"entries of {key!r}", numbers.itemsize)
        start, self.at = self.at, self.at + count * numbers.itemsize
        self.require(self.at)
        numbers.frombytes(self.data[start : self.at])
        return numbers


def _parse(cursor: _Cursor) -> GgufHeader:
    _check_magic(cursor)
    num_tensors = cursor.count("tensors", _SMALLEST_TENSOR)
    num_entries = cursor.count("metadata keys", _SMALLEST_ENTRY)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise cursor.corrupt("the metadata", f"key {key!r} twice", "each key once")
        metadata[key] = cursor.value(cursor.number(_U32), key)
    tensors = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment % 8 or not 8 <= alignment <= 1 << 20:
        raise cursor.corrupt("key 'general.alignment'", repr(alignment), "a multiple of 8")
    return GgufHeader(metadata, tensors, -(-cursor.at // alignment) * alignment)


def _check_magic(cursor: _Cursor) -> None:
    cursor.require(8)
    if cursor.data[:4] != b"GGUF":
        raise cursor.corrupt("the beginning", cursor.data[:4], "b'GGUF'")
    cursor.at = 4
    version = cursor.number(_U32)
    if version not in (2, 3):
        big_endian = " (big-endian)" if int(version).to_bytes(4, "little")[::-1] in (b"\2\0\0\0", b"\3\0\0\0") else ""
        problem, wanted = f"{cursor.file}: the GGUF version is not supported", "version 2 or 3, little-endian"
        raise CheckpointError(problem, got=f"{version}{big_endian}", wanted=wanted, change="convert the file again")


def _tensor(cursor: _Cursor) -> GgufTensor:
    name = cursor.text("a tensor's name")
    num_dims = cursor.number(_U32)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.corrupt(f"the number of dimensions of tensor {name!r}", num_dims, f"1 to {_MAX_DIMS}")
    shape = tuple(int(cursor.number(_U64)) for _ in range(num_dims))[::-1]
    if not 1 <= math.prod(shape) < 2**63:
        raise cursor.corrupt(f"the shape of tensor {name!r}", shape, "sizes above 0")
    return GgufTensor(name, shape, cursor.number(_U32), cursor.number(_U64))
