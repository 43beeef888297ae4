"""Checkpoint -> parameters, with a ledger that accounts for every tensor on both sides."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rapid_llm.checkpoint.source import STORED_CODES, CheckpointSource
from rapid_llm.errors import CheckpointError
from rapid_llm.runtime.staging import place_pieces, plan_pieces
from rapid_llm.weights import WeightSlot

_LISTED = 8
"""Names an error lists before it counts the rest."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded: tensors, bytes read, seconds."""

    num_tensors: int
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.num_bytes / 1e9 / max(self.seconds, 1e-9)
        return f"loaded {self.num_tensors} tensors, {self.num_bytes / 1e6:.1f} MB in {self.seconds:.2f} s ({rate:.2f} GB/s)"


def match_tensors(source: CheckpointSource, slots: Iterable[WeightSlot]) -> dict[str, WeightSlot]:
    """Pair every tensor of the file with its place, before anything is read.

    Raises:
        CheckpointError: lists the names that are missing, unexpected, or of another shape or dtype.
    """
    with _without_collections():
        wanted = {slot.name: slot for slot in slots}
    held = source.tensors
    missing = [name for name, slot in wanted.items() if name not in held and not slot.optional]
    unexpected = [name for name in held if name not in wanted]
    misshaped = [
        f"{name} is {list(held[name].shape)}, not {list(slot.target.shape)}"
        for name, slot in wanted.items()
        if name in held and held[name].shape != tuple(slot.target.shape)
    ]
    mistyped = [
        f"{name} is {held[name].dtype}, not {' or '.join(slot.dtypes) or 'of floats'}"
        for name, slot in wanted.items()
        if name in held and not _takes(slot, held[name].dtype)
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("mis-shaped", misshaped), ("mistyped", mistyped))
    if found := [f"{len(names)} {kind} ({_listing(names)})" for kind, names in kinds if names]:
        wanted_text = f"exactly the {len(wanted)} tensors of the architecture"
        change = "load the checkpoint that this config belongs to"
        raise CheckpointError(
            f"{source.path}: tensors do not match the model", got="; ".join(found), wanted=wanted_text, change=change
        )
    return {name: wanted[name] for name in held}


def load_weights(
    source: CheckpointSource, slots: Iterable[WeightSlot], progress: Callable[[int, int, float], None] | None = None
) -> LoadReport:
    """Read every tensor once into its place, several pieces at a time.

    Args:
        source: the open checkpoint.
        slots: every place of the model.
        progress: called with bytes done, bytes in all and seconds so far.

    Raises:
        CheckpointError: see match_tensors; also when a file turns out to be damaged.
    """
    start = time.perf_counter()
    matched = match_tensors(source, slots)
    total, done = sum(source.tensors[name].nbytes for name in matched), 0
    pieces = plan_pieces(source.tensors[name] for name in matched)
    for piece in place_pieces(source, pieces, {name: slot.target for name, slot in matched.items()}):
        done += sum(part.nbytes for part in piece.parts)
        if progress is not None:
            progress(done, total, time.perf_counter() - start)
    for finish in dict.fromkeys(slot.finish for slot in matched.values() if slot.finish is not None):
        finish()
    return LoadReport(len(matched), total, time.perf_counter() - start)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from looking for garbage: among 50,000 places of experts, all alive, that took most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _takes(slot: WeightSlot, dtype: str) -> bool:
    """Whether a tensor of this dtype in the file may fill the slot: stored codes are never taken for values."""
    return dtype in slot.dtypes if slot.dtypes else dtype not in STORED_CODES


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
