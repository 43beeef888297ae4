"""The CUDA context, made while torch is imported: a third of a second of the driver's that needs no Python."""

import contextlib
import ctypes
import threading

from rapid_llm.config import EngineConfig
from rapid_llm.entrypoints.compile_ahead import may_use_gpu


def begin_context(config: EngineConfig) -> None:
    """Begin to make the context of the engine's GPU, if it will have one, in a thread of its own.

    Torch uses the same one, a device's primary context. Whatever stands in the way, torch will meet and say.
    """
    if may_use_gpu(config):
        index = int((config.device or "").partition(":")[2] or 0)
        threading.Thread(target=_make, args=(index,), name="context", daemon=True).start()


def _make(index: int) -> None:
    with contextlib.suppress(OSError):
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), index):
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
