"""Tensor data on its way from files to parameters: cut into pieces that several threads read and place at once.

A piece is a run of neighbouring tensors, or some rows of a large one, read in one sequential go. A thread reads it into a staging
buffer, pinned where the parameters lie on a GPU, and sends it on from there; what is held on the host at a time is a few pieces,
however large a tensor or a file is.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from rapid_llm.checkpoint.source import STORED_CODES, CheckpointSource, TensorInfo
from rapid_llm.weights import Intake, Target

PIECE_BYTES = 32 << 20
"""Bytes of a piece, as stored and as values, unless one row is larger: a read long enough for any storage to stream."""

MAX_THREADS = 8
_LARGEST_GAP = 4096  # bytes between two tensors that are read along rather than sought over: files align them
_TORCH_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", *STORED_CODES)}


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``start`` to ``stop`` of a tensor, ``nbytes`` from byte ``offset`` of its file on."""

    info: TensorInfo
    start: int
    stop: int
    offset: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return (self.stop - self.start, *self.info.shape[1:]) if self.info.shape else ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Parts that lie side by side in one file."""

    file: Path
    offset: int
    nbytes: int
    parts: tuple[Part, ...]


def plan_pieces(infos: Iterable[TensorInfo], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Cut tensors, given in file order, into pieces. Every byte of theirs lies in exactly one."""
    pieces: list[Piece] = []
    run: list[Part] = []
    held = 0  # bytes of the run's values

    def close() -> None:
        if run:
            start, end = run[0].offset, run[-1].offset + run[-1].nbytes
            pieces.append(Piece(run[0].info.file, start, end - start, tuple(run)))
            run.clear()

    for part in (part for info in infos for part in _parts_of(info, piece_bytes)):
        values = _value_bytes(part)
        if run:
            gap = part.offset - (run[-1].offset + run[-1].nbytes)
            is_neighbour = part.info.file == run[0].info.file and 0 <= gap <= _LARGEST_GAP
            if not is_neighbour or max(part.offset + part.nbytes - run[0].offset, held + values) > piece_bytes:
                close()
                held = 0
        run.append(part)
        held += values
    close()
    return pieces


def _parts_of(info: TensorInfo, piece_bytes: int) -> Iterator[Part]:
    """The whole tensor, or as many rows at a time as fit a piece."""
    rows = info.shape[0] if info.shape else 1
    whole = Part(info, 0, rows, info.offset, info.nbytes)
    if info.is_reordered or not info.nbytes:
        yield whole
        return
    row_bytes = info.nbytes // rows
    at_once = max(1, piece_bytes // max(row_bytes, _value_bytes(whole) // rows))
    for start in range(0, rows, at_once):
        stop = min(start + at_once, rows)
        yield Part(info, start, stop, info.offset + start * row_bytes, (stop - start) * row_bytes)


def _value_bytes(part: Part) -> int:
    """Bytes that the values take on the host: as stored, or dequantised to float32."""
    if part.info.dtype in _TORCH_DTYPES:
        return part.nbytes
    return 4 * math.prod(part.shape)


def place_pieces(
    source: CheckpointSource, pieces: list[Piece], targets: Mapping[str, Target], *, threads: int | None = None
) -> Iterator[Piece]:
    """Read every piece once and copy its parts into ``targets``; yields each piece when it is in place, in any order.

    Args:
        source: the open checkpoint.
        pieces: of plan_pieces.
        targets: a tensor's place by its name, of its shape, any strides, all on one device.
        threads: None takes a few, by the processor.

    Raises:
        CheckpointError: a file that was cut or cannot be read. Reading stops then.
    """
    device = next(iter(targets.values())).device if targets else torch.device("cpu")
    count = min(threads or min(MAX_THREADS, os.cpu_count() or 1), max(len(pieces), 1))
    buffers: SimpleQueue[torch.Tensor | None] = SimpleQueue()
    for _ in range(count):
        buffers.put(None)  # made when first needed: pinning takes time

    def place(piece: Piece) -> Piece:
        buffer = buffers.get()
        try:
            if buffer is None or len(buffer) < piece.nbytes:
                size = max(piece.nbytes, min(PIECE_BYTES, max(each.nbytes for each in pieces)))
                buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            _place(source, piece, buffer[: piece.nbytes], targets, device)
        finally:
            buffers.put(buffer)
        return piece

    with ThreadPoolExecutor(count, thread_name_prefix="loader") as pool:
        pending = [pool.submit(place, piece) for piece in pieces]
        try:
            for done in as_completed(pending):
                yield done.result()
        finally:
            for future in pending:
                future.cancel()


def _place(
    source: CheckpointSource, piece: Piece, buffer: torch.Tensor, targets: Mapping[str, Target], device: torch.device
) -> None:
    """Fill ``buffer`` with the piece's bytes and copy its parts to their places, done when this returns."""
    source.fill(piece.file, piece.offset, buffer.numpy())
    if device.type != "cuda":
        for part, raw in _cut(piece, buffer):
            target = _target(targets, part)
            target.copy_(_rows(source, part, raw) if _wants_bytes(target) else _values(source, part, raw))
        return
    with torch.cuda.device(device):
        ends = [_target(targets, part) for part in piece.parts]
        goes = [_goes_as_it_is(part, target) for part, target in zip(piece.parts, ends, strict=True)]
        sent = buffer.to(device, non_blocking=True) if any(goes) else buffer  # the whole piece in one transfer
        for i, ((part, raw), (_, host)) in enumerate(zip(_cut(piece, sent), _cut(piece, buffer), strict=True)):
            bits = raw if goes[i] else host
            values = _rows(source, part, bits) if _wants_bytes(ends[i]) else _values(source, part, bits)
            ends[i].copy_(values.to(device))
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()  # the buffer is somebody else's from here on


def _cut(piece: Piece, buffer: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    for part in piece.parts:
        start = part.offset - piece.offset
        yield part, buffer[start : start + part.nbytes]


def _target(targets: Mapping[str, Target], part: Part) -> Target:
    target = targets[part.info.name]
    return target[part.start : part.stop] if part.info.shape else target


def _wants_bytes(target: Target) -> bool:
    """Whether a target takes rows as bytes in place of values."""
    return isinstance(target, Intake) and target.as_stored


def _goes_as_it_is(part: Part, target: Target) -> bool:
    """Whether the bytes of a part are what its target takes; others are worked on by the host first."""
    return part.info.is_plain or (_wants_bytes(target) and not part.info.is_reordered)


def _rows(source: CheckpointSource, part: Part, raw: torch.Tensor) -> torch.Tensor:
    """The bytes of a part by row, put in order where the file needs it."""
    count = part.shape[0]
    return torch.from_numpy(source.rows(part.info.name, raw.numpy(), count)) if part.info.is_reordered else raw.view(count, -1)


def _as_stored(part: Part, raw: torch.Tensor) -> torch.Tensor:
    """Bytes as the plain numbers they are."""
    dtype = _TORCH_DTYPES[part.info.dtype]
    aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype).view(part.shape)


def _values(source: CheckpointSource, part: Part, raw: torch.Tensor) -> torch.Tensor:
    """The values of a part, dequantised and put in order by the host where the file needs it."""
    if part.info.is_plain:
        return _as_stored(part, raw)
    values = torch.from_numpy(source.decode(part.info.name, raw.numpy(), part.shape))
    return values.view(torch.bfloat16) if part.info.dtype == "bfloat16" else values
