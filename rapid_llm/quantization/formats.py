"""What a checkpoint's format means for a layer: how its weight is kept, and which of the file's tensors fill it."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from rapid_llm.quantization.packed import Packed, Place
from rapid_llm.weights import WeightSlot


class WeightFormat(Protocol):
    """One format, as one layer has it.

    Attributes:
        kind: its name for people and tables: "int8", "gptq".
    """

    @property
    def kind(self) -> str: ...  # noqa: D102

    def empty(self, place: Place, n: int, k: int, *, experts: int | None = None) -> Packed:
        """A weight of this format before it is loaded.

        Raises: ConfigError, without the layer's name, when such a matrix cannot be kept so.
        """

    def slots(self, name: str, part: Packed) -> Iterator[WeightSlot]:
        """The file's tensors of the layer ``name`` ("model.layers.0.mlp.up_proj"), which fill ``part`` of its weight."""


class Formats(Protocol):
    """The formats of a whole model."""

    def of(self, names: Sequence[str], k: int) -> WeightFormat | None:
        """How a layer stacked of these checkpoint layers, with rows of ``k``, is kept; None keeps plain numbers.

        Raises: CheckpointError or ConfigError, naming the layer, when they cannot be stacked or kept so.
        """


class Plain:
    """Every layer keeps its numbers."""

    def of(self, names: Sequence[str], k: int) -> None:
        """Nothing is packed."""
