"""Counts what the CUDA driver loads, whoever asked: Triton, NVRTC, torch and its libraries. With CUPTI, which torch brings along.

https://docs.nvidia.com/cupti/api/group__CUPTI__CALLBACK__API.html
"""

import contextlib
import ctypes
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

RESOURCE, MODULE_LOADED = 3, 6
"""CUPTI_CB_DOMAIN_RESOURCE and CUPTI_CBID_RESOURCE_MODULE_LOADED."""
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class _Module(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("size", ctypes.c_size_t), ("cubin", ctypes.c_void_p)]


class _Resource(ctypes.Structure):
    _fields_ = [("context", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("module", ctypes.POINTER(_Module))]


def _cupti() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    site = Path(torch.__file__).parents[1]
    found = [str(file) for file in site.glob(f"nvidia/**/libcupti.so.{major}")]
    return ctypes.CDLL(found[0] if found else f"libcupti.so.{major}")


@contextlib.contextmanager
def module_loads() -> Iterator[list[str]]:
    """A list that gets the size of each module that is loaded meanwhile, and where Python was."""
    cupti, loads, subscriber = _cupti(), [], ctypes.c_void_p()

    @_CALLBACK
    def loaded(_user, _domain, kind, data):
        if kind == MODULE_LOADED:
            size = ctypes.cast(data, ctypes.POINTER(_Resource)).contents.module.contents.size
            calls = [f"{Path(call.filename).name}:{call.lineno} {call.line}" for call in traceback.extract_stack(limit=5)[:-1]]
            loads.append(f"{size:,} bytes, by {', '.join(reversed(calls))}")

    _check("cuptiSubscribe", cupti.cuptiSubscribe(ctypes.byref(subscriber), loaded, None))
    try:
        _check("cuptiEnableCallback", cupti.cuptiEnableCallback(1, subscriber, RESOURCE, MODULE_LOADED))
        yield loads
    finally:
        _check("cuptiUnsubscribe", cupti.cuptiUnsubscribe(subscriber))


def _check(call: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{call} gave {status}, 0 was wanted")
