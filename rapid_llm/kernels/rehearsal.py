"""Launches on tensors without memory, of which only what they would compile is noted: what an engine needs, before it is there.

    with rehearse(device_info("h200"), lambda kernel: pool.submit(kernel.compile)):
        launch_everything(config, source, device)

A compiler needs neither a GPU nor a driver, so all of it can run in another process while this one loads weights. What is written
goes to Triton's own cache, where the launch that comes later finds it: the public wrappers, the tile policy and Triton's
specialisation have run as they will then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver as drivers
from triton.runtime.jit import JITFunction

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import DeviceInfo, simulate_launches

_numbers = count(10_000)


class StubDriver(DriverBase):  # type: ignore[misc]
    """A driver that knows what it compiles for and can do nothing else.

    Args:
        sm: the target.
        number: a device number that no device of this machine has; what was compiled under one is not compiled again.
    """

    def __init__(self, sm: int, number: int) -> None:
        self.sm, self.number = sm, number

    @classmethod
    def is_active(cls) -> bool:
        """Never found by itself."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Types are only compared."""
        return ty

    def get_current_target(self) -> Any:
        """What kernels are compiled for."""
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        """The number."""
        return self.number

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched on it."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where Triton itself would make tensors."""
        return torch.device("cpu")

    def get_device_capability(self, *device: Any) -> tuple[int, int]:
        """As CUDA counts it."""
        return divmod(self.sm, 10)

    def get_benchmarker(self) -> Any:
        """Raises: ConfigError; a kernel that is only compiled has no time."""
        raise ConfigError("nothing can be timed without a GPU", change="take tiles from resolve_tiles")


@contextmanager
def stub_driver(device: DeviceInfo, number: int | None = None) -> Iterator[StubDriver]:
    """Within it kernels are compiled for ``device``, and launches on tensors that are on no GPU take its tiles.

    Args:
        device: the target.
        number: as in StubDriver; None is that of all launches for such a target.

    Raises: ConfigError for a device that is no GPU.
    """
    if device.sm is None:
        raise ConfigError("nothing compiles for this device", got=device.name, wanted="a cuda device", change="name one")
    active, driver = drivers._active, StubDriver(device.sm, 1000 + device.sm if number is None else number)
    drivers.set_active(driver)
    try:
        with simulate_launches(device):
            yield driver
    finally:
        drivers._active = active


@dataclass(frozen=True, slots=True)
class Kernel:
    """One binary that a launch would have needed; it can be sent to another process.

    Attributes:
        module, name: of the function, at the top of its module.
        source_key: Triton's key of its source. It differs with what was compiled before in a process: constants of functions
            that it calls are part of it only where their own key was known. That of a launch in its turn is what counts.
        language: Triton's type of sources of the function's language, Triton or Gluon.
        target, signature, constexprs, options, attrs: what Triton compiles it for.
    """

    module: str
    name: str
    source_key: str
    language: Any
    target: Any
    signature: Any
    constexprs: Any
    options: Any
    attrs: Any

    def compile(self) -> Any:
        """Compile it, or find it in Triton's cache; returns Triton's compiled kernel, whose ``hash`` is its name there."""
        function = getattr(import_module(self.module), self.name)
        function.hash = self.source_key
        source = self.language(function, self.signature, self.constexprs, self.attrs)
        return triton.compile(source, target=self.target, options=self.options.__dict__)


def build_driver() -> None:
    """Have a C compiler make what Triton loads binaries with, where it needs one (up to 3.7) and has not done so yet.

    Raises: AssertionError without the driver's library, RuntimeError or CalledProcessError where it cannot be compiled.
    """
    if hasattr(nvidia, "compile_module_from_src"):
        nvidia.CudaUtils()


def build_launcher(compiled: Any) -> None:
    """The same for what launches kernels of this signature. Raises as ``build_driver``."""
    if hasattr(nvidia, "compile_module_from_src"):
        nvidia.CudaLauncher(compiled.src, compiled.metadata)


@contextmanager
def rehearse(device: DeviceInfo, needed: Callable[[Kernel], object]) -> Iterator[None]:
    """Within it, launches run nothing and return None; what each new one would compile is told to ``needed``, once.

    Tensors may be of torch's "meta" device. Raises: ConfigError for a device that is no GPU.
    """
    with stub_driver(device, next(_numbers)) as driver, _library_products_do_nothing():
        run, compile_for = JITFunction.run, JITFunction._do_compile
        target, noted = driver.get_current_target(), set()

        def note(
            function: Any, key: Any, signature: Any, _: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool
        ) -> None:
            if (function, key) not in noted:
                noted.add((function, key))
                names = (function.module, function.fn.__name__, function.cache_key, function.ASTSource)
                needed(Kernel(*names, target, signature, constexprs, options, attrs))

        def run_nothing(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return run(function, *args, grid=grid, warmup=True, **kwargs)

        JITFunction.run, JITFunction._do_compile = run_nothing, note
        try:
            yield
        finally:
            JITFunction.run, JITFunction._do_compile = run, compile_for


@contextmanager
def _library_products_do_nothing() -> Iterator[None]:
    """Give products that a library makes a form for tensors without memory that does nothing.

    Torch's product of fp8 values has none, and its own ones of the others import a system for algebra first: half a second, and
    more where that has no bytecode.
    """
    with torch.library._scoped_library("aten", "IMPL", "Meta") as library:
        for name in ("mm.out", "addmm.out", "_scaled_mm.out"):
            library.impl(name, lambda *args, out, **rest: out, allow_override=True)
        yield
