"""One layer through a format's slots, without files or a model."""

from dataclasses import dataclass
from pathlib import Path

import torch

from rapid_llm.kernels.device import device_info
from rapid_llm.modules.placement import Placement
from rapid_llm.quantization.checkpoint import checkpoint_formats
from rapid_llm.weights import WeightSlot

FILE = Path("folder")
CPU = Placement(device_info("cpu"), torch.device("cpu"), torch.float32)


@dataclass(frozen=True)
class Stored:
    """A row of a file's table."""

    shape: tuple[int, ...]
    dtype: str


def table_of(tensors):
    """What a file that holds ``tensors`` by name says of them."""
    return {name: Stored(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()}


def named(tensors, name="layer"):
    """Tensors by what follows a layer's name, by their whole names."""
    return {f"{name}{key}" if key.startswith("_") else f"{name}.{key}": value for key, value in tensors.items()}


def load_layer(config, tensors, n, k, place=CPU, *, pieces=1):
    """The format of "layer" and its weight, filled with ``tensors`` in ``pieces`` of their rows, last first, and checked."""
    tensors = named(tensors)
    form = checkpoint_formats(config, table_of(tensors), FILE).of(["layer"], k)
    weight = form.empty(place, n, k)
    slots = list(form.slots("layer", weight))
    fill(slots, tensors, pieces)
    return form, weight


def fill(slots: list[WeightSlot], tensors, pieces=1):
    """What a loader does: every tensor into its slot, then each finish once."""
    assert {slot.name for slot in slots if not slot.optional} <= set(tensors)
    assert set(tensors) <= {slot.name for slot in slots}
    for slot in slots:
        if slot.name not in tensors:
            continue
        values = tensors[slot.name]
        assert tuple(slot.target.shape) == tuple(values.shape), slot.name
        if not values.dim():
            slot.target.copy_(values)
            continue
        size = -(-len(values) // pieces)
        for start in reversed(range(0, len(values), size)):
            slot.target[start : start + size].copy_(values[start : start + size])
    for finish in dict.fromkeys(slot.finish for slot in slots if slot.finish is not None):
        finish()
