"""Weights in few bits as they lie on a device, and the ops that multiply by them: one class a way of keeping them."""

import threading
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Self

import torch

from rapid_llm.errors import CheckpointError

E4M3_MAX = 448.0
"""The largest number in e4m3."""

Product = Callable[[Any, torch.Tensor, torch.Tensor | None], None]
"""Writes x @ weight.T (+ bias) into ``out``, given (x, out, bias); x is a tensor [num_tokens, k], or what w8a8 says beside it."""


class Place(Protocol):
    """What a weight needs of where it lies."""

    @property
    def device(self) -> torch.device:
        """Where its tensors go."""

    def kernel(self, op: str, **sizes: int) -> Callable[..., Any]:
        """What serves an op there."""

    def is_native(self, op: str, **sizes: int) -> bool:
        """Whether a row other than plain torch serves it."""


class Packed:
    """A matrix [n, k] in few bits, or with ``experts`` a stack of them, [experts, n, k].

    Attributes:
        experts_op: the op that multiplies by such stacks; "" where there is none.
        n, k: rows and columns as numbers.
        tensors: by their names as the ops' arguments; each one's first dimension (second in a stack) is along n.
        group: elements along k that share a scale; k where a row has one.
        order: of the whole, int32 [k]: which of the checkpoint's columns each of its own is; None is the same one.
        is_ordered: whether there may be such an order, so that ``product`` binds what gathers the activations' columns.
        lock: of the whole, for a loader's threads that write parts of one byte.
    """

    experts_op: ClassVar[str] = ""

    def __init__(self, n: int, k: int, group: int, tensors: dict[str, torch.Tensor]) -> None:
        self.n, self.k, self.group, self.tensors = n, k, group, tensors
        self._whole: Self | None = None
        self.order: torch.Tensor | None = None
        self.is_ordered = False
        self.lock = threading.Lock()
        self._checks: list[Callable[[], None]] = []

    @property
    def whole(self) -> Self:
        """What this is a view of; itself where it is none."""
        return self if self._whole is None else self._whole

    @property
    def weight(self) -> torch.Tensor:
        """The codes."""
        return self.tensors["weight"]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.weight.device

    @property
    def experts_sizes(self) -> dict[str, int]:
        """What ``experts_op`` is asked for beside the sizes of a layer: a group of 0 is a scale for a whole row."""
        return {"group": 0 if self.group == self.k else self.group}

    def part(self, start: int, stop: int) -> Self:
        """Views of some rows: of what one checkpoint tensor fills."""
        return self._view(stop - start, {name: each[start:stop] for name, each in self.tensors.items()})

    def expert(self, number: int) -> Self:
        """Views of one matrix of a stack."""
        return self._view(self.n, {name: each[number] for name, each in self.tensors.items()})

    def _view(self, n: int, tensors: dict[str, torch.Tensor]) -> Self:
        view = type(self)(n, self.k, self.group, tensors)
        view._whole = self.whole
        return view

    def put_scales(self, start: int, values: torch.Tensor, *, width: int = 0) -> None:
        """Take scales of rows from ``start`` on: [rows, groups], or one for each ``width`` of k, which narrower groups share."""
        kept = self.tensors["scales"].view(self.n, -1)
        if width and width != self.group:
            columns = torch.arange(kept.shape[1], device=self.device) * self.group // width
            values = values.index_select(1, columns)
        kept[start : start + len(values)] = values

    def after_loading(self, check: Callable[[], None]) -> None:
        """Have ``finish`` run ``check``: what can be said of a part once all of it is there."""
        self.whole._checks.append(check)

    def finish(self) -> None:
        """Run every part's checks, then settle the whole; the ``finish`` of its slots. Raises: CheckpointError."""
        whole = self.whole
        checks, whole._checks = whole._checks, []
        for check in checks:
            check()
        if whole.order is not None and torch.equal(whole.order, _own_order(whole)):
            whole.order = None
        whole.settle()

    def settle(self) -> None:
        """Keep simpler tensors where the loaded values allow it."""

    def arrange(self, name: str, order: torch.Tensor | None) -> None:
        """Say in which order a part's columns are, once it is loaded; the parts of one weight share x, so they share the order.

        Raises: CheckpointError, naming the checkpoint layer ``name``, when another part has another one.
        """
        whole = self.whole
        mine = _own_order(self) if order is None else order.to(torch.int32)
        if whole.order is not None and not torch.equal(whole.order, mine):
            raise CheckpointError(
                f"{name} has its columns in another order than the layer that it is stacked with",
                got="two activation orders (g_idx)",
                wanted="one, as the layers read the same activations",
                change="use a checkpoint that was quantised without desc_act, or with static_groups",
            )
        whole.order = mine

    def _arranger(self, place: "Place") -> Callable[[torch.Tensor], torch.Tensor]:
        """What brings activations into the order of the columns."""
        if not self.is_ordered:
            return lambda x: x
        gather = place.kernel("gather_columns", k=self.k)
        return lambda x: x if self.order is None else gather(x, self.order, out=torch.empty_like(x))

    def _restored(self, values: torch.Tensor) -> torch.Tensor:
        """Values [n, k] with their columns in the checkpoint's order."""
        order = self.whole.order
        return values if order is None else torch.empty_like(values).index_copy_(1, order.long(), values)

    def product(self, place: Place) -> Product:
        """Bind what multiplies by this matrix there."""
        raise NotImplementedError

    def numbers(self) -> torch.Tensor:
        """The values, [n, k] in float32."""
        raise NotImplementedError

    def round(self, start: int, values: torch.Tensor) -> None:
        """Keep float32 ``values``, rows from ``start`` on, as near as this way of keeping them allows."""
        raise NotImplementedError


def halves_of(octets: torch.Tensor) -> torch.Tensor:
    """Bytes [.., w] -> codes uint8 [.., 2w], the low half first."""
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def scaled(values: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What takes the largest magnitude along the last dimension to ``largest``, kept as a dimension of one, and values over it;
    the scale of zeros is 0."""
    scales = values.abs().amax(-1, keepdim=True) / largest
    return scales, values / torch.where(scales > 0, scales, 1.0)


def _own_order(weight: Packed) -> torch.Tensor:
    return torch.arange(weight.k, dtype=torch.int32, device=weight.device)


class Int8Weight(Packed):
    """int8 [n, k] and an fp32 scale for each row [n], or for each group of one [n, k / group].

    Rounding: to the nearest of -127..127 times the largest magnitude over 127.
    """

    experts_op = "fused_moe_w8a16"

    @classmethod
    def empty(cls, place: Place, n: int, k: int, *, group: int = 0, experts: int | None = None) -> "Int8Weight":
        """Zeros with scales that are NaN until they are loaded; ``group`` 0 gives a row one scale."""
        lead = () if experts is None else (experts,)
        shape = (*lead, n, k // group) if group else (*lead, n)
        tensors = {
            "weight": torch.zeros(*lead, n, k, dtype=torch.int8, device=place.device),
            "scales": torch.full(shape, torch.nan, device=place.device),
        }
        return cls(n, k, group or k, tensors)

    def product(self, place: Place) -> Product:
        """By w8a16_gemm."""
        gemm, arranged = place.kernel("w8a16_gemm", n=self.n, k=self.k, group=self.group), self._arranger(place)
        weight, scales = self.weight, self.tensors["scales"]
        return lambda x, out, bias: gemm(arranged(x), weight, scales, out=out, bias=bias)

    def numbers(self) -> torch.Tensor:
        """The values."""
        groups = self.weight.float().view(self.n, -1, self.group) * self.tensors["scales"].view(self.n, -1, 1)
        return self._restored(groups.view(self.n, self.k))

    def round(self, start: int, values: torch.Tensor) -> None:
        """Round rows, a scale for each group."""
        groups = values.view(len(values), -1, self.group)
        scales, codes = scaled(groups, 127)
        self.put_scales(start, scales[..., 0])
        self.weight[start : start + len(values)] = codes.round_().view(values.shape).to(torch.int8)


class Fp8Bytes(Int8Weight):
    """e4m3 [n, k], scaled as int8 is: what multiplies activations that keep their dtype.

    Rounding: to e4m3 of the largest magnitude over 448.
    """

    @classmethod
    def empty(cls, place: Place, n: int, k: int, *, group: int = 0, experts: int | None = None) -> "Fp8Bytes":
        """As of Int8Weight."""
        tensors = Int8Weight.empty(place, n, k, group=group, experts=experts).tensors
        return cls(n, k, group or k, tensors | {"weight": tensors["weight"].view(torch.float8_e4m3fn)})

    def round(self, start: int, values: torch.Tensor) -> None:
        """Round rows, a scale for each group."""
        groups = values.view(len(values), -1, self.group)
        scales, codes = scaled(groups, E4M3_MAX)
        self.put_scales(start, scales[..., 0])
        self.weight[start : start + len(values)] = codes.clamp_(-E4M3_MAX, E4M3_MAX).view(values.shape).to(torch.float8_e4m3fn)


class Int4Weight(Packed):
    """Two 4-bit codes a byte [n, k / 2], with a scale and a zero code [n, k / group] a group: value = (code - zero) * scale.

    Without "zeros" among its tensors every zero code is 8. Rounding: from a group's least to its largest value in 15 steps.
    """

    experts_op = "fused_moe_w4a16"

    @classmethod
    def empty(
        cls, place: Place, n: int, k: int, *, group: int = 0, zeros: bool = True, experts: int | None = None
    ) -> "Int4Weight":
        """Zeros with scales that are NaN until they are loaded; ``group`` 0 gives a row one scale."""
        lead, groups = () if experts is None else (experts,), k // (group or k)
        tensors = {
            "weight": torch.zeros(*lead, n, k // 2, dtype=torch.uint8, device=place.device),
            "scales": torch.full((*lead, n, groups), torch.nan, device=place.device),
        }
        if zeros:
            tensors["zeros"] = torch.zeros(*lead, n, groups, dtype=torch.uint8, device=place.device)
        return cls(n, k, group or k, tensors)

    def product(self, place: Place) -> Product:
        """By w4a16_gemm."""
        gemm, arranged = place.kernel("w4a16_gemm", n=self.n, k=self.k, group=self.group), self._arranger(place)
        weight, scales, tensors = self.weight, self.tensors["scales"], self.tensors
        return lambda x, out, bias: gemm(arranged(x), weight, scales, out=out, zeros=tensors.get("zeros"), bias=bias)

    def settle(self) -> None:
        """Zero codes that are all 8 need not be read."""
        zeros = self.tensors.get("zeros")
        if zeros is not None and bool((zeros == 8).all()):
            del self.tensors["zeros"]

    def numbers(self) -> torch.Tensor:
        """The values."""
        codes = halves_of(self.weight).view(self.n, -1, self.group).float()
        zeros = self.tensors["zeros"].float()[..., None] if "zeros" in self.tensors else 8.0
        return self._restored(((codes - zeros) * self.tensors["scales"].float()[..., None]).view(self.n, self.k))

    def round(self, start: int, values: torch.Tensor) -> None:
        """Round rows, group by group."""
        groups = values.view(len(values), -1, self.group)
        low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)  # zero itself stays exact
        scales = (high - low) / 15
        steps = torch.where(scales > 0, scales, 1.0)
        zeros = (-low / steps).round_()
        codes = ((groups / steps[..., None]).round_() + zeros[..., None]).clamp_(0, 15).to(torch.uint8).view(len(values), -1)
        stop = start + len(values)
        self.weight[start:stop] = codes[:, ::2] | codes[:, 1::2] << 4
        self.tensors["scales"][start:stop], self.tensors["zeros"][start:stop] = scales, zeros.to(torch.uint8)
