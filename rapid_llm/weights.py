"""What a layer tells the loader: the checkpoint tensors it wants and where each one goes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Target(Protocol):
    """What a loader fills: a tensor, or what takes values as one would."""

    @property
    def shape(self) -> torch.Size:
        """As of a tensor."""

    @property
    def device(self) -> torch.device:
        """As of a tensor."""

    def __getitem__(self, rows: slice, /) -> "Target":
        """Some of the rows."""

    def copy_(self, values: torch.Tensor, /) -> Any:
        """Take over ``values``, of this shape."""


class Intake:
    """A target that hands rows to a function instead of keeping them: it repacks or rounds them on their way in.

    Args:
        store: takes the first row's number and some rows, of any dtype, on ``device``. Rows come in any pieces and order, from
            several threads.
        shape: of the checkpoint's tensor.
        device: where ``store`` wants them.
        as_stored: whether ``store`` wants the bytes of the rows as the file has them, uint8 [rows, bytes of a row], in place of
            their values: blocks of a GGUF type.
    """

    def __init__(
        self,
        store: Callable[[int, torch.Tensor], None],
        shape: tuple[int, ...],
        device: torch.device,
        *,
        as_stored: bool = False,
    ) -> None:
        self._store, self._start = store, 0
        self.shape, self.device, self.as_stored = torch.Size(shape), device, as_stored

    def __getitem__(self, rows: slice) -> "Intake":
        """Some of the rows."""
        first, last, _ = rows.indices(self.shape[0])
        some = Intake(self._store, (last - first, *self.shape[1:]), self.device, as_stored=self.as_stored)
        some._start = self._start + first
        return some

    def copy_(self, values: torch.Tensor) -> "Intake":
        """Hand ``values``, of this shape or as they are stored, over."""
        self._store(self._start, values.to(self.device))
        return self


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One checkpoint tensor's place in a parameter.

    Attributes:
        name: the tensor's Hugging Face name.
        target: a view of the parameter, of the tensor's own shape, any strides; or an Intake.
        dtypes: names that the tensor's dtype in the file may have; empty is any float or GGUF type.
        finish: called once, after every slot is filled; slots of one matrix share it. It checks and settles what only the whole
            matrix tells, and raises CheckpointError.
        optional: whether a file may leave the tensor out.
    """

    name: str
    target: Target
    dtypes: tuple[str, ...] = ()
    finish: Callable[[], None] | None = None
    optional: bool = False


class Layer(Protocol):
    """Anything that owns parameters."""

    def weights(self) -> Iterator[WeightSlot]:
        """Every place that must be filled before the layer may run."""
