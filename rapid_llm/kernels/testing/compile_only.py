"""Real launches on CPU tensors, compiled for a chosen GPU instead of run. Needs neither a GPU nor a driver.

    with compile_only(device_info("a100")) as record:
        swiglu(gate_up, out=out)
    record.check()

The public wrappers, the tile policy and Triton's own specialisation run as they do on that device; what comes out is a binary for
it, whose shared memory, registers, spills and instructions can be read. Works on Triton 3.6 to 3.9, in a process without
TRITON_INTERPRET: there nothing would be compiled, so it is refused.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.runtime import driver as drivers
from triton.runtime.jit import JITFunction

from rapid_llm.errors import ConfigError, RapidError
from rapid_llm.kernels.device import MAX_GRID, DeviceInfo
from rapid_llm.kernels.rehearsal import stub_driver


class CompileCheckError(RapidError):
    """A binary that would not launch, or not run well, on the device it is for."""


@dataclass(frozen=True)
class CompiledLaunch:
    """One launch: what it would have run, and where.

    Attributes:
        kernel: name of the kernel.
        device: what it was compiled for.
        grid: three axes.
        specialization: of each runtime parameter its type and class: ("i32", "D") is a multiple of 16, ("constexpr", 1) is 1.
        constexprs: values of the compile-time parameters.
        compiled: Triton's compiled kernel, with ``asm`` and ``metadata``.
    """

    kernel: str
    device: DeviceInfo
    grid: tuple[int, int, int]
    specialization: dict[str, tuple[Any, Any]]
    constexprs: dict[str, Any]
    compiled: Any

    @property
    def variant(self) -> str:
        """Equal for launches that share a binary."""
        return str(self.compiled.hash)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of one program."""
        return int(self.compiled.metadata.shared)

    @property
    def num_warps(self) -> int:
        """Warps of one program."""
        return int(self.compiled.metadata.num_warps)

    @property
    def ptx(self) -> str:
        """The PTX text."""
        return str(self.compiled.asm["ptx"])

    @property
    def ttgir(self) -> str:
        """Triton's IR after layouts and pipelining were chosen."""
        return str(self.compiled.asm["ttgir"])

    @property
    def cubin(self) -> bytes:
        """The binary."""
        return bytes(self.compiled.asm["cubin"])

    @property
    def registers(self) -> int:
        """Registers of one thread."""
        return _resources(self.cubin)[0]

    @property
    def spilled(self) -> int:
        """Bytes of one thread's stack, which is where registers spill to."""
        return _resources(self.cubin)[1]

    @property
    def load_bits(self) -> tuple[int, ...]:
        """Bits that each load from global memory moves at a time, in the order of the PTX; a bulk (TMA) copy counts as 128."""
        return load_bits(self.ptx)


@dataclass
class CompileRecord:
    """The launches of one ``compile_only`` block, in order."""

    device: DeviceInfo
    launches: list[CompiledLaunch] = field(default_factory=list)

    def variants(self) -> dict[str, int]:
        """How many binaries each kernel was compiled to."""
        found: dict[str, set[str]] = {}
        for launch in self.launches:
            found.setdefault(launch.kernel, set()).add(launch.variant)
        return {kernel: len(hashes) for kernel, hashes in found.items()}

    def check(self, *, max_spilled: int = 0) -> None:
        """Hold every launch to the limits of its device.

        Args:
            max_spilled: bytes of stack that a thread may use.
        Raises: CompileCheckError when nothing was compiled, and on too much shared memory, too many spills, a grid or a number
            of threads past its limit.
        """
        if not self.launches:
            raise CompileCheckError("nothing was compiled", wanted="at least one launch", change="call a kernel in the block")
        for launch in {launch.variant + str(launch.grid): launch for launch in self.launches}.values():
            _check(launch, max_spilled)


@contextmanager
def compile_only(device: DeviceInfo) -> Iterator[CompileRecord]:
    """Within it, ``kernel[grid](...)`` on CPU tensors compiles for ``device`` and records the launch; nothing runs.

    Raises: ConfigError for a device that is no GPU, and where kernels are interpreted.
    """
    if triton.knobs.runtime.interpret:
        raise ConfigError("kernels are interpreted", got="TRITON_INTERPRET=1", wanted="it unset", change="use another process")
    record = CompileRecord(device)
    run = JITFunction.run

    def compile_and_record(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(function, *args, grid=grid, warmup=True, **kwargs)
        record.launches.append(_launch(function, device, grid, compiled, args, kwargs))
        return compiled

    with stub_driver(device):
        JITFunction.run = compile_and_record
        try:
            yield record
        finally:
            JITFunction.run = run


def _launch(
    function: Any, device: DeviceInfo, grid: Any, compiled: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> CompiledLaunch:
    *_, binder = function.device_caches[drivers.active.get_current_device()]
    bound, specialization, _ = binder(*args, **kwargs)
    axes = tuple(grid(bound) if callable(grid) else grid)
    names = [param.name for param in function.params]
    constant = {param.name for param in function.params if param.is_constexpr}
    return CompiledLaunch(
        kernel=function.fn.__name__,
        device=device,
        grid=(*axes, 1, 1)[:3] if len(axes) < 3 else axes,
        specialization={name: tuple(kind) for name, kind in zip(names, specialization, strict=False) if name not in constant},
        constexprs={name: bound[name] for name in names if name in constant},
        compiled=compiled,
    )


def _check(launch: CompiledLaunch, max_spilled: int) -> None:
    where = f"{launch.kernel} on {launch.device.name} with {launch.constexprs}"
    for axis, (programs, limit) in enumerate(zip(launch.grid, MAX_GRID, strict=True)):
        if not 1 <= programs <= limit:
            wanted = f"1 to {limit:,} programs on axis {axis}"
            change = "put unbounded counts on axis 0, and launch nothing where there is nothing to do"
            raise CompileCheckError(f"{where}: the grid cannot be launched", got=f"{launch.grid}", wanted=wanted, change=change)
    smem = launch.device.smem or 0
    if launch.shared > smem:
        got, wanted = f"{launch.shared:,} bytes", f"at most {smem:,}"
        raise CompileCheckError(
            f"{where}: too much shared memory", got=got, wanted=wanted, change="take a smaller tile or fewer stages"
        )
    if launch.num_warps * 32 > 1024:
        raise CompileCheckError(
            f"{where}: too many threads", got=f"{launch.num_warps} warps", wanted="at most 32", change="take fewer"
        )
    if launch.spilled > max_spilled:
        got = f"{launch.spilled:,} bytes of stack, {launch.registers} registers"
        wanted = f"at most {max_spilled:,} bytes"
        raise CompileCheckError(f"{where}: registers spill", got=got, wanted=wanted, change="take a smaller tile or more warps")


@cache
def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as cuobjdump of the Triton wheel tells."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [tool, "--dump-resource-usage", str(path)]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    if found is None:
        raise CompileCheckError(
            "cuobjdump names no registers", got=told.strip(), wanted="REG:n STACK:n", change="look at the binary"
        )
    return int(found[1]), int(found[2])


_LOAD = re.compile(r"\bld\.global(?:\.[A-Za-z0-9:_]+)*?(?:\.v(\d))?\.[bfsu](\d+)\b")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global(?:\.[a-zA-Z0-9:_]+)* \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)")
_BULK = re.compile(r"\bcp\.async\.bulk\.(?:tensor|shared)")


def load_bits(ptx: str) -> tuple[int, ...]:
    """Bits that each instruction of a PTX text loads from global memory, in order; a bulk copy counts as 128."""
    found = [(match.start(), int(match[1] or 1) * int(match[2])) for match in _LOAD.finditer(ptx)]
    found += [(match.start(), 8 * int(match[1], 0)) for match in _COPY.finditer(ptx)]
    found += [(match.start(), 128) for match in _BULK.finditer(ptx)]
    return tuple(bits for _, bits in sorted(found))
