"""A mixture of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538): a router chooses, for each token, the few gated
feed-forwards that see it, and their outputs are added by its weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rapid_llm.errors import ConfigError
from rapid_llm.modules.linear import Linear
from rapid_llm.modules.placement import Placement
from rapid_llm.quantization.formats import Plain
from rapid_llm.quantization.packed import Packed
from rapid_llm.weights import WeightSlot


@dataclass(frozen=True)
class MixtureSizes:
    """What one sparse layer is made of.

    Attributes:
        hidden_size: width of its input and output.
        intermediate_size: of one expert.
        num_experts, top_k: experts, and how many of them see a token.
        renormalise: whether a token's weights, of all experts' softmax, are made to sum to 1 over its own.
        parts: what the checkpoint calls an expert's gate, up and down.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    renormalise: bool
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


class ExpertStack:
    """One matrix an expert, [num_experts, n, in_features], each stacked of ``parts`` of ``rows`` rows.

    Attributes:
        weight: in the compute dtype, or as the format of these layers keeps it.
    """

    def __init__(self, place: Placement, name: str, num_experts: int, parts: Sequence[str], rows: int, in_features: int) -> None:
        self.rows = rows
        self.names = tuple(tuple(f"{name}.{number}.{part}" for part in parts) for number in range(num_experts))
        self.format = place.formats.of([each for names in self.names for each in names], in_features)
        n = len(parts) * rows
        self.weight: torch.Tensor | Packed
        if self.format is None:
            self.weight = place.weight(num_experts, n, in_features)
        else:
            self.weight = self.format.empty(place, n, in_features, experts=num_experts)

    @property
    def kind(self) -> str:
        """How it is kept, for people."""
        return "plain numbers" if self.format is None else self.format.kind

    def arguments(self, name: str) -> dict[str, torch.Tensor]:
        """Its tensors as the fused ops call them, ``name`` being the weight's."""
        if isinstance(self.weight, torch.Tensor):
            return {name: self.weight}
        return {name if each == "weight" else f"{name}_{each}": tensor for each, tensor in self.weight.tensors.items()}

    def weights(self) -> Iterator[WeightSlot]:
        """Every part of every expert."""
        for number, names in enumerate(self.names):
            matrix = self.weight[number] if isinstance(self.weight, torch.Tensor) else self.weight.expert(number)
            for place, name in enumerate(names):
                start, stop = place * self.rows, (place + 1) * self.rows
                if isinstance(matrix, torch.Tensor):
                    yield WeightSlot(f"{name}.weight", matrix[start:stop])
                elif self.format is not None:
                    yield from self.format.slots(name, matrix.part(start, stop))


class MixtureOfExperts:
    """Router and experts. The router keeps its numbers whatever the experts' format: it is small, and a wrong choice is not.

    Raises: ConfigError, naming the layer, when nothing multiplies by experts kept as the checkpoint or the user asks.
    """

    def __init__(self, place: Placement, name: str, sizes: MixtureSizes) -> None:
        self.sizes = sizes
        gate, up, down = sizes.parts
        width, inner, count = sizes.hidden_size, sizes.intermediate_size, sizes.num_experts
        self.router = Linear(replace(place, formats=Plain()), [(f"{name}.gate", count)], width)
        self.gate_up = ExpertStack(place, f"{name}.experts", count, (gate, up), inner, width)
        self.down = ExpertStack(place, f"{name}.experts", count, (down,), width, inner)
        self._route = place.kernel("route_experts", num_experts=count, top_k=sizes.top_k)
        op, more = _op_of(name, self.gate_up, self.down)
        layer = {"num_experts": count, "top_k": sizes.top_k, "hidden_size": width, "intermediate_size": inner}
        self._fused = place.kernel(op, **layer, **more)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        shape, logits = (x.shape[0], self.sizes.top_k), self.router(x)
        ids = x.new_empty(shape, dtype=torch.int32)
        weights = x.new_empty(shape, dtype=torch.float32)
        self._route(logits, out_ids=ids, out_weights=weights, renormalise=self.sizes.renormalise)
        out = torch.empty_like(x)
        stacks = self.gate_up.arguments("gate_up") | self.down.arguments("down")
        self._fused(x, **stacks, ids=ids, weights=weights, out=out)
        return out

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layers that one matrix makes up."""
        return (self.router,)

    def weights(self) -> Iterator[WeightSlot]:
        """The router's and every expert's."""
        for part in (self.router, self.gate_up, self.down):
            yield from part.weights()


def _op_of(name: str, gate_up: ExpertStack, down: ExpertStack) -> tuple[str, dict[str, int]]:
    """The op that multiplies by these experts, and the sizes it is asked for beside those of the layer."""
    first, second = gate_up.weight, down.weight
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return "fused_moe", {}
    if isinstance(first, Packed) and isinstance(second, Packed) and type(first) is type(second) and first.experts_op:
        return first.experts_op, dict(first.experts_sizes.items() & second.experts_sizes.items())  # what differs is left open
    kinds = " and ".join(dict.fromkeys((gate_up.kind, down.kind)))
    problem = f"{name}.experts cannot be kept as the checkpoint has them"
    wanted = "experts of one format that a fused_moe op multiplies by"
    raise ConfigError(
        problem, got=kinds, wanted=wanted, change="use a checkpoint of plain numbers, with quantize='int8' or 'int4'"
    )
