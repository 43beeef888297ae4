"""What a kernel family declares: KernelSpec rows, their CapabilityRequirement, and one Contract an op. Torch-free data."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rapid_llm.kernels.device import DeviceInfo

Phase = Literal["decode", "prefill", "both"]
"""What an op's row serves: rows of one new token a sequence, rows of many, or both."""

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by compute dtype."""

Sizes = Mapping[str, int]
"""Named sizes of one call of an op (``{"num_tokens": 7, "d": 1536}``); the names are the contract's."""


@dataclass(frozen=True)
class CapabilityRequirement:
    """What a row needs of a device before it may be launched there. Each unmet need is a reason of its own.

    Attributes:
        device_types: "cuda", "cpu".
        min_sm, max_sm: compute capability as major * 10 + minor, both ends included.
        native_fp8: needs e4m3 in hardware (sm89 and later); also for rows that take an e4m3 pointer.
        min_smem: bytes of shared memory one program needs.
        packages: importable packages the row's module needs, for example ("triton",).
        min_triton, max_triton: Triton (major, minor), both ends included; checked where Triton is installed.
    """

    device_types: tuple[str, ...] = ("cuda",)
    min_sm: int | None = None
    max_sm: int | None = None
    native_fp8: bool = False
    min_smem: int = 0
    packages: tuple[str, ...] = ()
    min_triton: tuple[int, int] | None = None
    max_triton: tuple[int, int] | None = None

    def unmet(self, device: DeviceInfo) -> list[str]:
        """Every need that ``device`` does not meet, one sentence each; empty when the row may be launched there.

        Packages and Triton versions are facts of an installation, not of a device: the dispatcher checks them.
        """
        reasons = []
        if device.type not in self.device_types:
            reasons.append(f"needs a {' or '.join(self.device_types)} device, {device.name} is {device.type}")
        if self.min_sm is not None and device.sm is not None and device.sm < self.min_sm:
            reasons.append(f"needs sm{self.min_sm} or later, {device.name} is sm{device.sm}")
        if self.max_sm is not None and device.sm is not None and device.sm > self.max_sm:
            reasons.append(f"needs sm{self.max_sm} or earlier, {device.name} is sm{device.sm}")
        if self.native_fp8 and not device.native_fp8:
            reasons.append(f"needs native e4m3 (sm89 or later), {device.name} has none")
        if self.min_smem and device.smem is not None and device.smem < self.min_smem:
            reasons.append(f"needs {self.min_smem:,} bytes of shared memory a program, {device.name} has {device.smem:,}")
        return reasons


@dataclass(frozen=True)
class Limit:
    """The values of one size that a row serves: ``low <= value <= high`` and ``value % multiple == 0``."""

    low: int = 0
    high: float = math.inf
    multiple: int = 1

    def __str__(self) -> str:
        bounds = f"{self.low}..{'' if self.high == math.inf else int(self.high)}"
        return bounds if self.multiple == 1 else f"{bounds} in steps of {self.multiple}"

    def allows(self, value: int) -> bool:
        """Whether ``value`` is served."""
        return self.low <= value <= self.high and value % self.multiple == 0


@dataclass(frozen=True)
class KernelSpec:
    """One row: one implementation of one op.

    Attributes:
        op: the contract it implements.
        name: "<backend>.<what>", unique in the catalog, for example "torch.swiglu".
        target: "package.module:function", imported on first use. The module is what evidence hashes.
        requires: what it needs of the device.
        dtypes: compute dtypes it serves, as torch names them.
        limits: sizes it serves; a size without a limit is free.
        priority: order among rows with no measured latency, higher first; fallback rows come last whatever it says.
        fallback: a plain-torch row: tested in CI, needs no evidence, ranked last.
        phase: what the row serves.
        int64_rows: the kernel casts pool row ids to int64 before it multiplies (see ``runtime/kv_pool.py``).
        library: calls a vendor library (cuBLAS); excluded where batch invariance is asked for.
        prepare: name of a function beside the target, called with a dict and the target's arguments once the target has run
            on them; returns the calls that do the same again on the same tensors, checks and views done. In the dict, calls
            of one recorded step keep what they share. "" (or no calls) repeats the target.
    """

    op: str
    name: str
    target: str
    requires: CapabilityRequirement
    dtypes: tuple[str, ...]
    limits: Mapping[str, Limit] = field(default_factory=dict)
    priority: int = 0
    fallback: bool = False
    phase: Phase = "both"
    int64_rows: bool = True
    library: bool = False
    prepare: str = ""

    def allows(self, sizes: Sizes) -> bool:
        """Whether every size that is named here and has a limit is within it."""
        return all(limit.allows(sizes[name]) for name, limit in self.limits.items() if name in sizes)


@dataclass(frozen=True)
class TensorArg:
    """One tensor of an op's signature.

    Attributes:
        name: the parameter's name.
        dims: names of its sizes, outermost first; "1" is a literal one.
        dtype: a torch name, or "compute" for the dtype that the op is dispatched on.
        written: whether the op writes it.
        views: views of it that an implementation must honour: "row_strided" (outer stride free), "strided" (every stride but
            the innermost free), "transposed" (any stride), "offset" (storage offset of one element). An implementation
            may refuse others, never misread them.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str = "compute"
    written: bool = False
    views: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cost:
    """What one call cannot do without, however it is implemented: the floor of its time.

    Attributes:
        read, written: bytes from and to memory, each once.
        flops: operations of matrix products; 0 where bytes alone count.
        operand_bytes: bytes of an element that is multiplied: 0 is the compute dtype's, 1 runs at twice the rate of 2.
    """

    read: int
    written: int
    flops: int = 0
    operand_bytes: int = 0


@dataclass(frozen=True)
class Contract:
    """What an op is, whoever implements it. Tests, benchmarks, verify and explain draw on it.

    Attributes:
        op: its name, which is its wrapper's, its reference's and its module's.
        summary: what it computes, one line.
        phase: rows it serves.
        tensors: its tensors, in the order of the signature.
        dtypes: compute dtypes.
        maxima: largest value of each size that an implementation must be correct at.
        sweep: sizes that verify runs and benchmarks sweep: decode and prefill, boundaries and ragged ones.
        defaults: sizes that ``explain`` assumes when it is told none.
        ids: what the values of an integer tensor may be, as text: {"slot_mapping": "-1 <= id < num_rows"}; -1 is skipped.
        free: the size that varies from call to call and is the first dimension of the first tensor; "" where there is none.
        hidden: sizes that only the device knows when a call is made: no choice hangs on them, latencies are means over them.
        cost: sizes and bytes of a compute element -> Cost of a call.
        devices: names in the device table that the op is meant to serve on.
        hard: hostile inputs it must stand, by the name of the case that makes them.
    """

    op: str
    summary: str
    phase: Phase
    tensors: tuple[TensorArg, ...]
    dtypes: tuple[str, ...]
    maxima: Sizes
    sweep: tuple[Sizes, ...]
    defaults: Sizes
    cost: Callable[[Sizes, int], Cost]
    free: str = ""
    hidden: tuple[str, ...] = ()
    ids: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "a100", "rtx3090", "l40s", "h200", "b200", "rtx5090")
    hard: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """The rows and contracts of one family, as ``ops/<family>/rows.py`` exports them under the name FAMILY."""

    name: str
    contracts: tuple[Contract, ...]
    rows: tuple[KernelSpec, ...]
