"""What a layer tells the loader: the checkpoint tensors it wants and where each one goes."""

from collections.abc import Iterator
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


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One checkpoint tensor's place in a parameter.

    Attributes:
        name: the tensor's Hugging Face name.
        target: a view of the parameter, of the tensor's own shape, any strides; or rows that are quantised on their way in.
    """

    name: str
    target: Target


class Layer(Protocol):
    """Anything that owns parameters."""

    def weights(self) -> Iterator[WeightSlot]:
        """Every place that must be filled before the layer may run."""
