"""A mixture of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538): a router chooses, for each token, the few gated
feed-forwards that see it, and their outputs are added by its weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.dispatcher.catalog import catalog, size_names
from rapid_llm.modules.linear import Linear
from rapid_llm.modules.placement import Placement
from rapid_llm.quantization.formats import Plain, WeightFormat
from rapid_llm.quantization.gguf import KeptBlocks
from rapid_llm.quantization.packed import Packed
from rapid_llm.quantization.w8a8 import BLOCK, W8A8
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
    """One matrix an expert, [num_experts, n, in_features], each stacked of checkpoint layers of ``rows`` rows.

    Args:
        names: of every expert's layers.
        form: how all of them are kept; None keeps plain numbers.

    Attributes:
        weight: in the compute dtype, or as the format keeps it.
    """

    def __init__(
        self, place: Placement, names: Sequence[Sequence[str]], rows: int, in_features: int, form: WeightFormat | None
    ) -> None:
        self.names, self.rows, self.format = names, rows, form
        n = len(names[0]) * rows
        self.weight: torch.Tensor | Packed
        if form is None:
            self.weight = place.weight(len(names), n, in_features)
        else:
            self.weight = _empty(place, form, names, n, in_features)
            if isinstance(self.weight, W8A8) and self.weight.by_block and n > rows and rows % BLOCK:
                got, wanted = f"{rows} rows in blocks of {BLOCK}", f"a multiple of {BLOCK}"
                change = "use a checkpoint whose scales are of rows"
                raise ConfigError(f"{names[0][0]} cannot be stacked with its neighbour", got=got, wanted=wanted, change=change)

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
        inputs = [[f"{name}.experts.{number}.{part}" for part in (gate, up)] for number in range(count)]
        outputs = [[f"{name}.experts.{number}.{down}"] for number in range(count)]
        forms = [place.formats.of(list(chain(*names)), k) for names, k in ((inputs, width), (outputs, inner))]

        def stacks(at: Placement) -> tuple[ExpertStack, ExpertStack]:
            return ExpertStack(at, inputs, inner, width, forms[0]), ExpertStack(at, outputs, width, inner, forms[1])

        # What they will be is told before they take memory.
        op, more = _op_of(*stacks(replace(place, device=torch.device("meta"))))
        if not op:
            _refuse_unless_numbers_will_do(name, forms)
            forms = [None, None]
        self.gate_up, self.down = stacks(place)
        layer = {"num_experts": count, "top_k": sizes.top_k, "hidden_size": width, "intermediate_size": inner}
        self._route = place.kernel("route_experts", num_experts=count, top_k=sizes.top_k)
        self._fused = place.kernel(op or "fused_moe", **layer, **more)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        shape, logits = (x.shape[0], self.sizes.top_k), self.router(x)
        ids = x.new_empty(shape, dtype=torch.int32)
        weights = x.new_empty(shape, dtype=torch.float32)
        self._route(logits, out_ids=ids, out_weights=weights, renormalise=self.sizes.renormalise)
        return self._experts(x, ids, weights)

    def expert(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """What one expert alone makes of ``x``, for whoever checks it."""
        ids = torch.full((x.shape[0], self.sizes.top_k), -1, dtype=torch.int32, device=x.device)
        ids[:, 0] = number
        return self._experts(x, ids, torch.ones_like(ids, dtype=torch.float32))

    def _experts(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
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


def _empty(place: Placement, form: WeightFormat, names: Sequence[Sequence[str]], n: int, k: int) -> Packed:
    """A stack before it is loaded. Raises: ConfigError, naming its first layer."""
    try:
        return form.empty(place, n, k, experts=len(names))
    except ConfigError as error:
        problem = f"{names[0][0]}: {error.problem}"
        raise ConfigError(problem, got=error.got, wanted=error.wanted, change=error.change) from error


def _op_of(gate_up: ExpertStack, down: ExpertStack) -> tuple[str, dict[str, int]]:
    """The op that multiplies by both, "" where there is none, and the sizes it is asked for beside those of the layer."""
    first, second = gate_up.weight, down.weight
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return "fused_moe", {}
    if isinstance(first, Packed) and isinstance(second, Packed) and type(first) is type(second) and first.experts_op:
        known = size_names(catalog().contract(first.experts_op))
        shared = first.experts_sizes.items() & second.experts_sizes.items()  # what differs is left open
        return first.experts_op, {size: value for size, value in shared if size in known}
    return "", {}


def _refuse_unless_numbers_will_do(name: str, forms: Sequence[WeightFormat | None]) -> None:
    """Blocks of a GGUF file are kept where that helps; the experts of any other format cannot be anything else."""
    if all(form is None or isinstance(form, KeptBlocks) for form in forms):
        return
    raise ConfigError(
        f"{name}.experts cannot be served in their format",
        got=" and ".join(dict.fromkeys("plain numbers" if form is None else form.kind for form in forms)),
        wanted="gate, up and down in one format that an op for experts multiplies by",
        change="use a checkpoint of plain numbers, as it is or with quantize='fp8', 'int8' or 'int4'",
    )
