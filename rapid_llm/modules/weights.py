"""What a layer tells the loader: the checkpoint tensors it wants and where each one goes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One checkpoint tensor's place in a parameter.

    Attributes:
        name: the tensor's Hugging Face name.
        target: a view of the parameter, of the tensor's own shape; any strides.
    """

    name: str
    target: torch.Tensor


class Layer(Protocol):
    """Anything that owns parameters."""

    def weights(self) -> Iterator[WeightSlot]:
        """Every place that must be filled before the layer may run."""
