"""Tensors placed so that a wrong kernel shows: NaN in every output, NaN around every tensor, odd strides and offsets by turns."""

import math
from collections.abc import Sequence

import torch

from rapid_llm.kernels.ops.interfaces import Contract, Sizes, TensorArg
from rapid_llm.kernels.verify.case import Check

GUARD_INTEGER = 1 << 30
"""What stands around an integer tensor of 32 bits or more, and in an output of such a dtype before the call."""

_GUARD_BYTES = {torch.int8: 0x80, torch.uint8: 0xFF, torch.float8_e4m3fn: 0x7F}
"""The same of bytes: -128, which no quantiser here writes, 255, and the NaN of e4m3, which torch does not know as one."""

_GUARD_ELEMENTS = 64  # before and after a tensor; a multiple of 16 bytes in every dtype, so "offset" alone is misaligned


def view_of(contract: Contract, name: str, sizes: Sizes, dtype: torch.dtype) -> str:
    """The view of a tensor in the case of these sizes: "plain" and those of its contract in turn, so that a sweep has all."""
    names = [arg.name for arg in contract.tensors]
    position = names.index(name)
    views = ("plain", *contract.tensors[position].views)
    turn = sum(sizes.values()) + position + contract.dtypes.index(str(dtype).removeprefix("torch."))
    return views[turn % len(views)]


class Stage:
    """Makes the tensors of one case in the views that are their turn.

    Args:
        contract: of the op.
        sizes, dtype, device: of the case.
    """

    def __init__(self, contract: Contract, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self._contract, self._sizes, self._dtype, self._device = contract, sizes, dtype, device
        self._guards: list[Check] = []

    def place(self, name: str, values: torch.Tensor, *, written: bool | None = None) -> torch.Tensor:
        """A view on the case's device that holds ``values``.

        Args:
            name: the tensor's name in the contract, which also gives its dtype.
            values: what it holds.
            written: whether the call writes it, so that its surroundings are checked; the contract's word if None.
        """
        arg = self._arg(name)
        dtype = self._dtype_of(arg)
        strides, offset = self._geometry(name, values.shape)
        span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True)) if values.numel() else 0
        storage = _guards((offset + span + _GUARD_ELEMENTS,), dtype, self._device)
        view = storage.as_strided(values.shape, strides, offset)
        view.copy_(values)
        if arg.written if written is None else written:
            self._guards.append(_surroundings(name, storage, [view]))
        return view

    def unwritten(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """An output before the call: NaN, or the guard of an integer dtype, inside as around."""
        return self.place(name, _guards(tuple(shape), self._dtype_of(self._arg(name)), self._device))

    def place_pools(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V pools [rows, heads, dim]: two tensors, or, when their turn is "row_strided", the head halves of one buffer."""
        if view_of(self._contract, "k_pool", self._sizes, self._dtype) != "row_strided":
            return self.place("k_pool", k), self.place("v_pool", v)
        rows, heads, dim = k.shape
        dtype = self._dtype_of(self._arg("k_pool"))
        storage = _guards((rows * 2 * heads * dim + 2 * _GUARD_ELEMENTS,), dtype, self._device)
        both = storage[_GUARD_ELEMENTS : storage.numel() - _GUARD_ELEMENTS].view(rows, 2 * heads, dim)
        halves = both[:, :heads], both[:, heads:]
        halves[0].copy_(k)
        halves[1].copy_(v)
        if self._arg("k_pool").written:
            self._guards.append(_surroundings("the pools", storage, halves))
        return halves

    def guards(self) -> list[Check]:
        """One check for each written tensor: nothing around it changed."""
        return list(self._guards)

    def _arg(self, name: str) -> TensorArg:
        return next(arg for arg in self._contract.tensors if arg.name == name)

    def _dtype_of(self, arg: TensorArg) -> torch.dtype:
        return self._dtype if arg.dtype == "compute" else getattr(torch, arg.dtype)

    def _geometry(self, name: str, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Strides and storage offset of the view whose turn it is."""
        view = view_of(self._contract, name, self._sizes, self._dtype)
        gap = (9, 16)[sum(self._sizes.values()) % 2]  # one odd, one that keeps rows of 16-bit elements on 16 bytes
        gaps = [0] * len(shape)
        if view in ("row_strided", "strided"):
            gaps = [0, *([gap] * (len(shape) - 1))] if view == "strided" else [0] * (len(shape) - 1) + [gap]
        order = range(len(shape)) if view == "transposed" else range(len(shape) - 1, -1, -1)
        strides, step = [0] * len(shape), 1
        for index, dim in enumerate(order):
            step += gaps[index]
            strides[dim] = step
            step *= max(1, shape[dim])
        return tuple(strides), _GUARD_ELEMENTS + (view == "offset")


def _guards(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of what stands around tensors of ``dtype``."""
    if dtype in _GUARD_BYTES:
        return torch.full(shape, _GUARD_BYTES[dtype], dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, math.nan if dtype.is_floating_point else GUARD_INTEGER, dtype=dtype, device=device)


def _is_guard(values: torch.Tensor) -> torch.Tensor:
    """Of each element whether it is still what ``_guards`` made."""
    if values.dtype in _GUARD_BYTES:
        return values.view(torch.uint8) == _GUARD_BYTES[values.dtype]
    return values.isnan() if values.is_floating_point() else values == GUARD_INTEGER


def _surroundings(name: str, storage: torch.Tensor, views: Sequence[torch.Tensor]) -> Check:
    """That every element of ``storage`` outside ``views`` still holds its filler."""
    around = torch.ones(storage.shape, dtype=torch.bool, device=storage.device)
    for view in views:
        around.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)

    def untouched() -> torch.Tensor:
        return _is_guard(storage)[around].long()

    return Check(f"around {name}", untouched, torch.ones(int(around.sum()), dtype=torch.int64), 0.0, 0.0)


def once_rounded(dtype: torch.dtype, *, terms: float = 1.0) -> tuple[float, float]:
    """rtol and atol of a result that is computed in fp32 and rounded once to ``dtype``.

    A rounding errs by at most half an eps of the dtype. A short fp32 computation before it, exp and rsqrt included, stays
    within 16 of its eps, counted on the result and on the largest of the ``terms`` that may cancel.
    """
    fp32, target = torch.finfo(torch.float32), torch.finfo(dtype)
    inner = 16 * fp32.eps
    subnormal = target.smallest_normal * target.eps
    return inner + (target.eps / 2 if dtype != torch.float32 else 0.0), inner * terms + subnormal


def scattered_slots(num_tokens: int, num_rows: int, generator: torch.Generator, hard: str | None) -> torch.Tensor:
    """Slots of tokens, int64, distinct and in no order; with "padding_slots" every other one lies outside the pool."""
    slots = torch.randperm(num_rows, generator=generator)[:num_tokens]
    if hard == "padding_slots":
        outside = torch.tensor([-1, num_rows, (1 << 31) - 1, -(1 << 31), num_rows + 1])
        padded = torch.arange(num_tokens) % 2 == 0
        slots = torch.where(padded, outside[torch.arange(num_tokens) // 2 % len(outside)], slots)
    return slots


def angle_table(rotary_dim: int, max_positions: int) -> torch.Tensor:
    """Cosines, then sines, float64 [max_positions, rotary_dim], of the usual frequencies."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def uniform(shape: Sequence[int], low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """fp32 values spread evenly over low .. high, on the CPU."""
    return low + (high - low) * torch.rand(tuple(shape), generator=generator)


def spikes(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """fp32 activations of which every eighth or so is +-448.25 or +-1e4, on the CPU: outliers as trained models have them."""
    values = torch.randn(tuple(shape), generator=generator)
    chosen = torch.randint(0, 8, tuple(shape), generator=generator) == 0
    heights = torch.tensor([448.25, -448.25, 1e4, -1e4])[torch.randint(0, 4, tuple(shape), generator=generator)]
    return torch.where(chosen, heights, values)
