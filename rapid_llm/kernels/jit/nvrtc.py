"""NVRTC, the compiler for CUDA C++ that is a library: a fifth of a second a source, no host compiler, no GPU. Torch-free.

CUDA builds of torch install it as a wheel of NVIDIA's. It is called through ctypes: torch's own way in is private, passes every
integer as 32 bits and keeps no binaries.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rapid_llm.errors import ConfigError, RapidError
from rapid_llm.kernels.jit.sources import OPTIONS

_SYSTEM_FOLDERS = (Path("/usr/local/cuda/lib64"), Path(f"/usr/lib/{platform.machine()}-linux-gnu"), Path("/usr/lib64"))


class CudaCompileError(RapidError):
    """A CUDA C++ source that NVRTC refuses. Its message ends with the compiler's log."""


@dataclass(frozen=True)
class Compiled:
    """What came of one source.

    Attributes:
        image: what the driver loads: a cubin, or PTX with its closing zero for a device that this NVRTC does not know.
        ptx: the PTX text.
        log: what the compiler said.
    """

    image: bytes
    ptx: str
    log: str


@cache
def find_nvrtc() -> Path | None:
    """The NVRTC library of this machine, None when there is none. Looks at files only; nothing is loaded.

    A wheel on the import path comes first, since that is the one that torch was built with; then a toolkit.
    """
    for folder in _library_folders():
        found = sorted(folder.glob("libnvrtc.so*"))
        if found:
            return found[-1]
    return None


def _library_folders() -> Iterator[Path]:
    for entry in sys.path:
        yield from sorted(Path(entry, "nvidia").glob("*/lib"))
    toolkits = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    yield from (Path(toolkit, name) for toolkit in toolkits if toolkit for name in ("lib64", "lib"))
    yield from (Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry)
    yield from _SYSTEM_FOLDERS


def compiler_identity() -> str:
    """What tells this machine's NVRTC from another: its file, as loading 110 MB to ask for the version would cost every start.

    Raises: ConfigError when there is none.
    """
    path = _found()
    stamp = path.stat()
    return f"{path} {stamp.st_size} {stamp.st_mtime_ns}"


def compile_cuda(name: str, text: str, sm: int, *, options: Sequence[str] = ()) -> Compiled:
    """Compile a source for one device.

    Args:
        name: what the compiler's messages call it.
        text: CUDA C++ whose kernels are ``extern "C"``; it may include nothing, since headers need not be installed.
        sm: compute capability as major * 10 + minor.
        options: NVRTC options besides the package's own, for example ``--ptxas-options=-v``.
    Raises: CudaCompileError with the log when it does not compile; ConfigError when NVRTC is missing or too old for ``sm``.
    """
    nvrtc = _library()
    architecture = architecture_for(sm, supported_architectures())
    flags = [f"--gpu-architecture={architecture}", *OPTIONS, *options]
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
    try:
        code = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags)))
        log = _read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if code:
            raise CudaCompileError(
                f"{name} does not compile for {architecture}",
                got=_error_name(code),
                change=f"correct the source:\n{log.rstrip('.')}",
            )
        ptx = _read(program, "PTX")
        image = _read(program, "CUBIN") if architecture.startswith("sm_") else ptx
        return Compiled(image, ptx.rstrip(b"\0").decode(), log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def architecture_for(sm: int, supported: Sequence[int]) -> str:
    """What to compile for: the device itself, or, where the compiler is older than it, PTX of the newest before it.

    Args:
        sm: the device.
        supported: what the compiler knows.
    Raises: ConfigError when all that it knows is newer.
    """
    if sm in supported:
        return f"sm_{sm}"
    older = [known for known in supported if known < sm]
    if not older:
        wanted = f"one of {', '.join(f'sm{known}' for known in supported)}"
        raise ConfigError("NVRTC does not compile for this device", got=f"sm{sm}", wanted=wanted, change="install an older NVRTC")
    return f"compute_{max(older)}"


@cache
def supported_architectures() -> tuple[int, ...]:
    """The devices that this machine's NVRTC compiles for, as major * 10 + minor. Raises: ConfigError when there is none."""
    count = ctypes.c_int()
    _check(_library().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    found = (ctypes.c_int * count.value)()
    _check(_library().nvrtcGetSupportedArchs(found))
    return tuple(found)


def _found() -> Path:
    path = find_nvrtc()
    if path is None:
        raise ConfigError(
            "there is no NVRTC on this machine",
            got="no libnvrtc.so",
            wanted="the compiler that kernels in CUDA C++ need",
            change="pip install nvidia-cuda-nvrtc, of the CUDA version that torch was built for, or take a row that needs none",
        )
    return path


@cache
def _library() -> ctypes.CDLL:
    path = _found()
    try:
        # NVRTC opens its builtins by bare name when it compiles. The loader does not look beside NVRTC for them, but it does
        # know by that name what is loaded.
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins))
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(
            "NVRTC cannot be loaded", got=str(error), wanted=f"a sound {path}", change="install nvidia-cuda-nvrtc anew"
        ) from error
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    """One of the things that NVRTC hands out as a size and that many bytes: "ProgramLog", "PTX", "CUBIN"."""
    nvrtc, size = _library(), ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(code: int) -> None:
    if code:
        raise ConfigError("NVRTC failed", got=_error_name(code), change="install nvidia-cuda-nvrtc anew")


def _error_name(code: int) -> str:
    return bytes(_library().nvrtcGetErrorString(code)).decode()
