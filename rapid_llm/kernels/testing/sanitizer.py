"""A sanitizer for kernels in Triton's interpreter: what would be silent corruption on a GPU becomes an error that names it.

    with sanitize(seed=3) as report:
        swiglu(gate_up, out=out)
    assert report.launches

Within it, for every launch:

- each lane that a mask lets through must fall on an element of the tensor its pointer came from: on one of the *view*, so that a
  read of the gap between two strided rows, or of V through the pointer of K, is found too;
- programs run in shuffled order, none may store what differs from what another stores there, or read what another stores;
- a program may not load what it has stored without ``tl.debug_barrier`` in between;
- lanes that are masked off in a load without ``other=`` read NaN, or a huge integer;
- offsets that overflow their 32 bits are errors (Triton's own check), and ``tl.device_assert`` is live;
- grid axes 1 and 2 stop at 65,535.

A program that has made an atomic access counts as ordered with the others. Needs TRITON_INTERPRET=1.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import triton
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from rapid_llm.errors import ConfigError, RapidError
from rapid_llm.kernels.device import MAX_GRID
from rapid_llm.kernels.testing.number_types import Values, install

_BARRIER = "put tl.debug_barrier() between the store and the load, or keep the value in registers"


class SanitizerError(RapidError):
    """What a kernel may not do, caught in the interpreter.

    Attributes:
        kernel: name of the kernel.
        argument: name of the pointer parameter, "" where there is none.
        lane: index of the first wrong lane in its tensor of pointers, None where there is none.
        offset: elements from the start of the argument's tensor to that lane's address, None where there is none.
    """

    kernel: str = ""
    argument: str = ""
    lane: int | None = None
    offset: int | None = None


@dataclass(frozen=True)
class InterpretedLaunch:
    """One launch that ran: the kernel's name and its grid."""

    kernel: str
    grid: tuple[int, ...]


@dataclass
class SanitizerReport:
    """What ran under the sanitizer, in order. Every launch in it was found clean."""

    launches: list[InterpretedLaunch] = field(default_factory=list)


@contextmanager
def sanitize(seed: int | None = 0) -> Iterator[SanitizerReport]:
    """Check every interpreted launch until the end of the block.

    Args:
        seed: of the order in which programs run; None is the order of the grid.
    Raises: SanitizerError from the launch that is wrong; ConfigError where kernels are not interpreted, or on nesting.
    """
    if not triton.knobs.runtime.interpret:
        raise ConfigError("kernels are not interpreted", wanted="TRITON_INTERPRET=1", change="set it before Triton is imported")
    if interpreter.GridExecutor.__call__.__module__ == __name__:
        raise ConfigError("sanitize is active already", wanted="one block at a time", change="leave the outer block first")
    install()
    state = _Sanitizer(random.Random(seed) if seed is not None else None)
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = type(options)(**{**vars(options), "debug": True})
    restore = [_patch(owner, name, replacement) for owner, name, replacement in state.replacements()]
    try:
        yield state.report
    finally:
        for undo in reversed(restore):
            undo()
        interpreter.interpreter_builder.options = options


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Replace ``owner.name`` by ``replacement``, which is given the original first; returns what undoes it."""
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, patched)
    return lambda: setattr(owner, name, original)


class _Argument:
    """Where the elements of one tensor argument lie, in bytes."""

    def __init__(self, name: str, tensor: Any) -> None:
        self.name, self.start, self.itemsize = name, tensor.data_ptr(), tensor.element_size()
        self.shape, self.strides = list(tensor.shape), list(tensor.stride())
        dims = sorted((stride, size) for stride, size in zip(self.strides, self.shape, strict=True) if size > 1 and stride > 0)
        run, span, levels, nested = self.itemsize, self.itemsize, list[tuple[int, int]](), True
        for stride, size in dims:
            step = stride * self.itemsize
            nested &= step >= span
            if step == run and not levels:
                run = step * size  # this dimension continues the one inside it
            else:
                levels.append((step, size))
            span += (size - 1) * step
        self.span = span if tensor.numel() else 0
        # Dimensions that overlap, as of a sliding window, cannot be told apart: only the extent is checked then.
        self.run, self.levels = (run, levels[::-1]) if nested and tensor.numel() else (self.span, [])

    def strays(self, addresses: Values, size: int) -> Values:
        """Which accesses of ``size`` bytes do not fall on elements of the tensor."""
        offsets = addresses.astype(np.int64) - self.start
        wrong: Values = (offsets < 0) | (offsets > self.span - size)
        for step, count in self.levels:
            index = offsets // step
            wrong |= index >= count
            offsets = offsets - index * step
        wrong |= offsets > self.run - size
        return wrong


@dataclass
class _Access:
    """Lanes of one load or store: addresses, bit patterns (of a store), the program and its running number."""

    argument: str
    addresses: Values
    program: int
    bits: Values | None = None


class _Sanitizer:
    def __init__(self, shuffle: random.Random | None) -> None:
        self._shuffle = shuffle
        self.report = SanitizerReport()
        self._kernel = ""
        self._arguments: dict[int, _Argument] = {}  # by id() of the tensor that the launch was given
        self._order: list[int] = []
        self._program = 0
        self._other_given = False
        self._stores: list[_Access] = []
        self._loads: list[_Access] = []
        self._unordered: dict[str, list[Values]] = {}  # addresses stored since the last barrier, by argument
        self._ordered_programs: set[int] = set()  # those that made an atomic access

    def replacements(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """What stands in for the interpreter's own functions: owner, name, function."""
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        keeps = ("create_addptr", "create_splat", "create_broadcast", "create_expand_dims", "create_reshape", "create_trans")
        return [
            (executor, "__call__", self._launch),
            (executor, "_init_args_hst", self._take_arguments),
            (interpreter, "_implicit_cvt", self._convert_argument),
            (builder, "set_grid_dim", self._set_grid),
            (builder, "set_grid_idx", self._set_program),
            (builder, "create_masked_load", self._load),
            (builder, "create_masked_store", self._store),
            (builder, "create_atomic_rmw", self._atomic_rmw),
            (builder, "create_atomic_cas", self._atomic_cas),
            (builder, "create_barrier", self._barrier),
            (builder, "create_assert", self._assert),
            (interpreter.TensorDescHandle, "materialize_pointers", self._materialize),
            (TritonSemantic, "load", self._semantic_load),
            *((builder, name, _keep_argument) for name in (*keeps, "create_bitcast", "create_int_cast")),
        ]

    # ---- a launch

    def _launch(self, original: Any, executor: Any, *args: Any, **kwargs: Any) -> None:
        self._kernel = executor.fn.__name__
        self._arguments, self._stores, self._loads, self._ordered_programs = {}, [], [], set()
        try:
            original(executor, *args, **kwargs)
        except triton.runtime.errors.InterpreterError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, SanitizerError):
                cause = cause.__cause__
            if cause is not None:
                raise cause from None
            raise
        self._check_programs()
        self.report.launches.append(InterpretedLaunch(self._kernel, interpreter.interpreter_builder.grid_dim))

    def _take_arguments(self, original: Any, executor: Any, args: Any, kwargs: Any) -> Any:
        host_args, host_kwargs = original(executor, args, kwargs)
        named = [*zip(executor.arg_names, host_args, strict=False), *host_kwargs.items()]
        for name, value in named:
            tensor = getattr(value, "base", value)  # of a descriptor, or of a reinterpreted tensor; None of a plain tensor
            tensor = value if tensor is None or not hasattr(tensor, "data_ptr") else tensor
            if hasattr(tensor, "data_ptr"):
                self._arguments[id(tensor)] = self._arguments[id(value)] = _Argument(name, tensor)
        return host_args, host_kwargs

    def _convert_argument(self, original: Any, value: Any) -> Any:
        converted = original(value)
        if id(value) in self._arguments and hasattr(value, "data_ptr"):
            converted.handle.attr["argument"] = self._arguments[id(value)]
        return converted

    def _set_grid(self, original: Any, builder: Any, *grid: int) -> None:
        for axis, (programs, limit) in enumerate(zip(grid, MAX_GRID, strict=True)):
            if programs > limit:
                problem = f"the grid of {self._kernel} is too large on axis {axis}"
                self._fail(problem, got=f"{grid}", wanted=f"at most {limit:,}", change="put the unbounded count on axis 0")
        self._order = list(range(math.prod(grid)))
        if self._shuffle is not None:
            self._shuffle.shuffle(self._order)
        original(builder, *grid)

    def _set_program(self, original: Any, builder: Any, x: int, y: int, z: int) -> None:
        _, ny, nz = builder.grid_dim
        self._program = self._order[(x * ny + y) * nz + z]
        self._unordered = {}
        original(builder, self._program // (ny * nz), self._program // nz % ny, self._program % nz)

    # ---- memory

    def _semantic_load(self, original: Any, semantic: Any, pointer: Any, mask: Any, other: Any, *rest: Any) -> Any:
        self._other_given = other is not None  # a scalar 0 does not reach create_masked_load: it counts as false on the way
        return original(semantic, pointer, mask, other, *rest)

    def _load(self, original: Any, builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        chosen, addresses, argument = self._check_bounds("reads", pointers, mask)
        if addresses.size:
            name = argument.name if argument else ""
            self._check_barrier(pointers, addresses, name)
            if self._program not in self._ordered_programs:
                self._loads.append(_Access(name, addresses, self._program))
        if other is None and not self._other_given and not chosen.all():
            other = _poison(pointers)
        self._other_given = False
        return original(builder, pointers, mask, other, *rest, **named)

    def _store(self, original: Any, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        chosen, addresses, argument = self._check_bounds("writes", pointers, mask)
        if addresses.size:
            name = argument.name if argument else ""
            self._unordered.setdefault(name, []).append(addresses)
            stored = np.ascontiguousarray(np.broadcast_to(value.data, chosen.shape)[chosen])
            bits = stored.view(f"u{stored.itemsize}")
            self._check_lanes(pointers, addresses, bits, name)
            if self._program not in self._ordered_programs:
                self._stores.append(_Access(name, addresses, self._program, bits))
        return original(builder, pointers, value, mask, *rest, **named)

    def _atomic_rmw(self, original: Any, builder: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._check_bounds("changes", pointers, mask)
        self._ordered_programs.add(self._program)
        return original(builder, op, pointers, value, mask, *rest)

    def _atomic_cas(self, original: Any, builder: Any, pointers: Any, *rest: Any) -> Any:
        self._check_bounds("changes", pointers, None)
        self._ordered_programs.add(self._program)
        return original(builder, pointers, *rest)

    def _barrier(self, original: Any, builder: Any) -> Any:
        self._unordered = {}
        return original(builder)

    def _assert(self, original: Any, builder: Any, condition: Any, message: Any) -> None:
        if not np.all(getattr(condition, "data", condition)):
            overflow = "overflow detected" in str(message)
            change = "cast to int64 before the arithmetic" if overflow else "look at what the kernel asserts"
            self._fail(f"{self._kernel}: {message}", got=self._where(), change=change)

    def _materialize(self, original: Any, descriptor: Any, *rest: Any) -> Any:
        pointers, mask = original(descriptor, *rest)
        pointers.attr.update(descriptor.base.attr)
        return pointers, mask

    # ---- checks

    def _check_bounds(self, does: str, pointers: Any, mask: Any) -> tuple[Values, Values, _Argument | None]:
        """The lanes that the mask lets through, their addresses, and the argument that the pointers came from."""
        shape = np.shape(pointers.data)
        chosen = np.broadcast_to(True if mask is None else getattr(mask, "data", mask), shape)
        addresses = np.asarray(pointers.data)[chosen]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        argument: _Argument | None = pointers.attr.get("argument")
        if argument is not None:
            strays = argument.strays(addresses, size)
        else:  # made from an integer, or chosen between two pointers: any tensor of the launch will do
            strays = np.ones(addresses.shape, dtype=bool)
            for known in self._arguments.values():
                strays &= known.strays(addresses, size)
        if strays.any():
            self._report_stray(does, argument, np.flatnonzero(chosen)[strays], addresses[strays])
        return chosen, addresses, argument

    def _report_stray(self, does: str, argument: _Argument | None, lanes: Values, addresses: Values) -> NoReturn:
        many = f"lane {int(lanes[0])}" + (f" and {len(lanes) - 1} more" if len(lanes) > 1 else "")
        change = "mask the lanes that fall outside, and check the strides and ids"
        if argument is None:
            problem = f"{self._kernel} {does} outside every tensor it was given"
            self._fail(problem, got=f"{many} {self._where()}", change=change, lane=int(lanes[0]))
        offset = (int(addresses[0]) - argument.start) // argument.itemsize
        self._fail(
            f"{self._kernel} {does} outside {argument.name}",
            got=f"{many} {self._where()} at element {offset}",
            wanted=f"an element of {argument.shape} strides {argument.strides}",
            change=change,
            argument=argument.name,
            lane=int(lanes[0]),
            offset=offset,
        )

    def _check_barrier(self, pointers: Any, addresses: Values, name: str) -> None:
        """A program must not load what it stored since its last barrier, through whatever argument."""
        low, high = addresses.min(), addresses.max()
        for stored_through, stored in self._unordered.items():
            for earlier in stored:
                apart = earlier.min() > high or earlier.max() < low
                both = earlier[:0] if apart else np.intersect1d(addresses, earlier)
                if both.size:
                    self._fail(
                        f"{self._kernel} loads through {name} what it has stored through {stored_through}, without a barrier",
                        got=f"{both.size} elements {self._where()}",
                        change=_BARRIER,
                        **self._place(pointers, int(both[0]), name),
                    )

    def _check_lanes(self, pointers: Any, addresses: Values, bits: Values, name: str) -> None:
        """Two lanes of one store must not write different values to one element."""
        order = np.argsort(addresses, kind="stable")
        there, what = addresses[order], bits[order]
        clash = np.flatnonzero((there[1:] == there[:-1]) & (what[1:] != what[:-1]))
        if clash.size:
            self._fail(
                f"{self._kernel} stores different values to one element of {name} in one store",
                got=f"{clash.size} such pairs {self._where()}",
                change="let one lane write each element",
                **self._place(pointers, int(there[clash[0]]), name),
            )

    def _check_programs(self) -> None:
        """No program may overwrite, or read, what another has stored."""
        if not self._stores or len({access.program for access in (*self._stores, *self._loads)}) < 2:
            return
        addresses, programs, values = _gather(self._stores)
        order = np.argsort(addresses, kind="stable")
        addresses, programs, values = addresses[order], programs[order], values[order]
        same = addresses[1:] == addresses[:-1]
        clash = np.flatnonzero(same & (programs[1:] != programs[:-1]) & (values[1:] != values[:-1]))
        if clash.size:
            first = int(clash[0])
            pair = f"programs {int(programs[first])} and {int(programs[first + 1])}"
            self._report_race(int(addresses[first]), "stores what another program stores otherwise", pair, clash.size)
        stored, start = np.unique(addresses, return_index=True)
        lowest, highest = (function.reduceat(programs, start) for function in (np.minimum, np.maximum))
        for load in self._loads:
            place = np.minimum(np.searchsorted(stored, load.addresses), len(stored) - 1)
            other = np.where(lowest[place] == load.program, highest[place], lowest[place])
            hits = np.flatnonzero((stored[place] == load.addresses) & (other != load.program))
            if hits.size:
                pair = f"program {load.program} reads, program {int(other[hits[0]])} stores"
                self._report_race(int(load.addresses[hits[0]]), "reads what another program stores", pair, hits.size)

    def _report_race(self, address: int, does: str, programs: str, count: int) -> NoReturn:
        argument = next((known for known in self._arguments.values() if 0 <= address - known.start < known.span), None)
        name = argument.name if argument else ""
        offset = (address - argument.start) // argument.itemsize if argument else None
        self._fail(
            f"{self._kernel}: a program {does}",
            got=f"{programs} at element {offset} of {name}, {count} elements in all",
            wanted="each element stored by one program and read by no other",
            change="split the work otherwise or launch twice; a barrier orders one program only",
            argument=name,
            offset=offset,
        )

    def _where(self) -> str:
        return f"in program {interpreter.interpreter_builder.grid_idx}"

    def _place(self, pointers: Any, address: int, name: str) -> dict[str, Any]:
        """The fields of an error about one address: argument, lane, offset."""
        argument: _Argument | None = pointers.attr.get("argument")
        lane = int(np.flatnonzero(np.asarray(pointers.data) == address)[0])
        offset = (address - argument.start) // argument.itemsize if argument else None
        return {"argument": name, "lane": lane, "offset": offset}

    def _fail(
        self, problem: str, *, got: str = "", wanted: str = "", change: str = "", argument: str = "", **place: int | None
    ) -> NoReturn:
        error = SanitizerError(problem, got=got, wanted=wanted, change=change)
        error.kernel, error.argument = self._kernel, argument
        error.lane, error.offset = place.get("lane"), place.get("offset")
        raise error


def _keep_argument(original: Any, builder: Any, *operands: Any, **named: Any) -> Any:
    """A pointer made from one pointer belongs to the same argument."""
    result = original(builder, *operands, **named)
    for operand in operands:
        argument = getattr(operand, "attr", {}).get("argument")
        if argument is not None:
            result.attr["argument"] = argument
    return result


def _poison(pointers: Any) -> Any:
    """What lanes that are masked off read where the kernel does not say: NaN, or 0x7f in every byte of an integer."""
    element = pointers.get_element_ty()
    dtype = interpreter._get_np_dtype(element)
    bits = np.full((*np.shape(pointers.data), dtype.itemsize), 0x01 if dtype.kind == "b" else 0x7F, dtype=np.uint8)
    values = bits.view(dtype).reshape(np.shape(pointers.data))
    if dtype.kind == "f":
        values = np.full_like(values, math.nan)
    elif element.is_bf16():
        values = np.full_like(values, 0x7FFF)
    return interpreter.TensorHandle(values, element)


def _gather(accesses: list[_Access]) -> tuple[Values, Values, Values]:
    """Addresses, programs and bit patterns of all lanes of some stores."""
    addresses = np.concatenate([access.addresses for access in accesses])
    programs = np.concatenate([np.full(access.addresses.shape, access.program) for access in accesses])
    values = np.concatenate([access.bits.astype(np.uint64) for access in accesses if access.bits is not None])
    return addresses, programs, values
