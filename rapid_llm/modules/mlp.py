"""The gated feed-forward of the llama family: down(silu(gate(x)) * up(x)) (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from collections.abc import Iterator

import torch

from rapid_llm.modules.linear import Linear
from rapid_llm.modules.placement import Placement
from rapid_llm.quantization.w8a8 import Activations
from rapid_llm.weights import WeightSlot


class GatedMLP:
    """Gate and up ride in one product."""

    def __init__(self, place: Placement, name: str, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        self.intermediate_size = intermediate_size
        parts = [(f"{name}.gate_proj", intermediate_size), (f"{name}.up_proj", intermediate_size)]
        self.gate_up = Linear(place, parts, hidden_size, bias=bias)
        self.down = Linear(place, [(f"{name}.down_proj", hidden_size)], intermediate_size, bias=bias)
        self._rounded = self.down.takes_fp8
        if self._rounded is None:
            self._swiglu = place.kernel("swiglu", d=intermediate_size)
        else:
            self._swiglu = place.kernel("swiglu_fp8", d=intermediate_size, group=self._rounded.group)

    def __call__(self, x: Activations) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        gate_up = self.gate_up(x)
        if self._rounded is not None:
            rows = self._rounded.room(len(gate_up))
            self._swiglu(gate_up, out=rows.codes, scales=rows.scales)
            return self.down(rows)
        activated = gate_up.new_empty(len(gate_up), self.intermediate_size)
        self._swiglu(gate_up, out=activated)
        return self.down(activated)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layers that one matrix makes up."""
        return (self.gate_up, self.down)

    def weights(self) -> Iterator[WeightSlot]:
        """Both layers'."""
        for part in self.linears:
            yield from part.weights()
