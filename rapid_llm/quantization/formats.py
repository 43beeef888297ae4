"""What a checkpoint's format means for a layer: how its weight is kept, and which of the file's tensors fill it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from rapid_llm.errors import CheckpointError
from rapid_llm.quantization.packed import Packed, Place
from rapid_llm.weights import WeightSlot

FLOATS = ("float32", "float16", "bfloat16")
"""Dtypes of plain numbers, as a table of tensors names them."""


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

    def dequantised(self, read: "Read", name: str) -> torch.Tensor:
        """The layer's values [n, k] in float64, from the file's tensors alone: what the slots filled is not looked at."""


class Stored(Protocol):
    """A tensor of a file, as its table tells it."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102


Held = Mapping[str, Stored]
"""The tensors of a checkpoint by name."""

Read = Callable[[str], torch.Tensor]
"""Reads a tensor of the checkpoint by name, in the dtype that it is stored in; of GGUF blocks the values."""


class CheckpointFormat(WeightFormat, Protocol):
    """A format that a checkpoint's config describes. Two that are equal can be stacked."""

    def codes(self, name: str) -> str:
        """What the file calls the codes of a layer: "model.layers.0.mlp.up_proj.qweight"."""

    def refusal(self, k: int) -> str:
        """Why rows of ``k`` cannot be kept so; empty when they can."""


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


class CheckpointFormats:
    """The formats of a quantised checkpoint. A layer whose numbers the file holds plainly is plain, whatever its config says.

    Args:
        rule: the format that the config gives a layer; None keeps plain numbers.
        held: the file's tensors.
        file: names the checkpoint in errors.
    """

    def __init__(self, rule: Callable[[str], CheckpointFormat | None], held: Held, file: Path) -> None:
        self._rule, self._held, self._file = rule, held, file

    def of(self, names: Sequence[str], k: int) -> CheckpointFormat | None:
        """See Formats. Raises: CheckpointError when layers that are one product here are kept differently, or cannot be kept."""
        found = [self._of(name) for name in names]
        for name, other in zip(names, found, strict=True):
            if other != found[0]:
                got = f"{names[0]}: {_described(found[0])}; {name}: {_described(other)}"
                raise CheckpointError(
                    f"{self._file}: layers that are multiplied as one are quantised differently",
                    got=got,
                    wanted="one format, with the same settings, for all of " + ", ".join(names),
                    change="use a checkpoint that quantises all of them, or none",
                )
        if found[0] is not None and (why := found[0].refusal(k)):
            raise unusable(self._file, names[0], found[0].kind, why)
        return found[0]

    def _of(self, name: str) -> CheckpointFormat | None:
        form, plain = self._rule(name), self._held.get(f"{name}.weight")
        if form is None or plain is None or plain.dtype not in FLOATS:
            return form
        codes = form.codes(name)
        return form if codes != f"{name}.weight" and codes in self._held else None


def unusable(file: Path, name: str, kind: str, why: str) -> CheckpointError:
    """The error for a layer that its format cannot keep."""
    change = "use a checkpoint with other groups, or one that leaves this layer out"
    return CheckpointError(f"{file}: {name} cannot be kept as {kind}", got=why, change=change)


def _described(form: CheckpointFormat | None) -> str:
    return "plain numbers" if form is None else repr(form)
