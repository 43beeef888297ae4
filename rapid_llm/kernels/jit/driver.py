"""Functions of compiled CUDA sources: loaded through the CUDA driver, launched on torch's current stream.

A step of few tokens is mostly launches, so what can be done once is done when a function is loaded: a call packs its arguments
into memory of this thread, to which the driver was pointed then, and enqueues. It waits for nothing, so a CUDA graph can capture
it; the first call loads the function, and is made before a capture. Torch is imported by that first call.
"""

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from rapid_llm.errors import ConfigError, RapidError
from rapid_llm.kernels.jit.binaries import cuda_binary

_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_FAULT = "a kernel before it may be at fault: run again with CUDA_LAUNCH_BLOCKING=1"


class CudaDriverError(RapidError):
    """The CUDA driver refused to load or to launch, or reports a fault of a kernel that ran before."""


class Driver:
    """The few calls of the CUDA driver that loading and launching take.

    Args:
        library: libcuda.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.launch: Callable[..., int] = library.cuLaunchKernel
        library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]

    def load(self, image: bytes, device: int) -> ctypes.c_void_p:
        """A module of ``image`` in the context that torch uses on the device. Raises: CudaDriverError."""
        self.make_current(device)
        module = ctypes.c_void_p()
        code = self._library.cuModuleLoadData(ctypes.byref(module), image)
        self.check(code, "cuModuleLoadData", change="install an NVRTC no newer than the CUDA version that nvidia-smi names")
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """A kernel of a module by name. Raises: CudaDriverError."""
        function = ctypes.c_void_p()
        code = self._library.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        self.check(code, f"cuModuleGetFunction of {name}")
        return function

    def make_current(self, device: int) -> None:
        """Make the device's primary context, which is torch's, this thread's. Raises: CudaDriverError."""
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self._library.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
        self.check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
        self.check(self._library.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def check(self, code: int, call: str, *, change: str = _FAULT) -> None:
        """Raises: CudaDriverError unless ``code`` is success."""
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            got = f"{name.value.decode() if name.value else 'CUDA error'} ({code})"
            raise CudaDriverError(f"{call} failed", got=got, change=change)


class _Arguments(threading.local):
    """One set of arguments a thread: another thread may launch while the driver reads this one's.

    Args:
        layout: a letter of ``struct`` for each parameter.
    """

    def __init__(self, layout: str) -> None:
        packing = struct.Struct(f"@{layout}")  # native alignment, which is that of a kernel's parameters
        self.memory = ctypes.create_string_buffer(packing.size)
        start = ctypes.addressof(self.memory)
        ends = [struct.calcsize(f"@{layout[: count + 1]}") for count in range(len(layout))]
        places = [start + end - struct.calcsize(letter) for letter, end in zip(layout, ends, strict=True)]
        self._pointers = (ctypes.c_void_p * len(layout))(*places)
        self.pointers = ctypes.addressof(self._pointers)
        self.pack_into = packing.pack_into


class CudaKernel:
    """A kernel on one device. A call enqueues it on torch's current stream of that device and returns.

    Args:
        driver: what launches it.
        function: its handle.
        layout: the type of each parameter as a letter of ``struct``: "P" a pointer, "q" int64, "i" int32, "f" fp32.
        device: index of its device.
        stream_of: the current stream of a device, as the driver's handle.
        current_device: index of the device that is current in this thread.
    """

    def __init__(
        self,
        driver: Driver,
        function: ctypes.c_void_p,
        layout: str,
        device: int,
        *,
        stream_of: Callable[[int], int],
        current_device: Callable[[], int],
    ) -> None:
        self._driver, self._function, self._device = driver, function, device
        self._arguments = _Arguments(layout)
        self._stream_of, self._current_device = stream_of, current_device

    def __call__(self, programs: int, threads: int, *arguments: int | float) -> None:
        """Launch.

        Args:
            programs: how many, all on axis 0.
            threads: of one program.
            arguments: the kernel's, in order; pointers as integers. What they point to must live until the kernel has run, as
                memory of torch tensors used on the current stream does.
        Raises: CudaDriverError; struct.error for arguments that are not of the layout.
        """
        if self._current_device() != self._device:
            self._launch_on_another_device(programs, threads, *arguments)
            return
        own = self._arguments
        own.pack_into(own.memory, 0, *arguments)
        stream = self._stream_of(self._device)
        code = self._driver.launch(self._function, programs, 1, 1, threads, 1, 1, 0, stream, own.pointers, None)
        if code == _INVALID_CONTEXT:  # a thread in which nothing has run yet
            self._driver.make_current(self._device)
            code = self._driver.launch(self._function, programs, 1, 1, threads, 1, 1, 0, stream, own.pointers, None)
        if code:
            self._driver.check(code, "cuLaunchKernel")

    def _launch_on_another_device(self, programs: int, threads: int, *arguments: int | float) -> None:
        import torch

        with torch.cuda.device(self._device):
            self(programs, threads, *arguments)


@cache
def cuda_kernel(source: str, function: str, layout: str, device: int) -> CudaKernel:
    """A kernel of a source of this package, loaded once a device.

    Args:
        source: for example "add_rms_norm.cu".
        function: name of the kernel in it.
        layout: types of its parameters, see ``CudaKernel``.
        device: index of the device, as torch counts.
    Raises: ConfigError when the source, NVRTC or the driver is missing; CudaCompileError; CudaDriverError.
    """
    import torch

    return CudaKernel(
        _driver(),
        _driver().function(_module(source, device), function),
        layout,
        device,
        # torch.cuda.current_stream makes an object for every call, ten times the time; Triton's launcher asks this one too.
        stream_of=torch._C._cuda_getCurrentRawStream,
        current_device=torch.cuda.current_device,
    )


@cache
def _module(source: str, device: int) -> ctypes.c_void_p:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    image = cuda_binary(source, 10 * major + minor)
    with torch.cuda.device(device):
        return _driver().load(image, device)


@cache
def _driver() -> Driver:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(
            "there is no CUDA driver on this machine", got=str(error), wanted="libcuda.so.1", change="install NVIDIA's driver"
        ) from error
    return Driver(library)
