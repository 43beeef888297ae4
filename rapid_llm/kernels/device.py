"""What a device can do, as data. Torch is imported inside the one function that looks at the machine through it."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from rapid_llm.envs import nearest
from rapid_llm.errors import ConfigError


@dataclass(frozen=True)
class DeviceInfo:
    """The facts of a device that kernel choices hang on.

    Attributes:
        name: the key of the device table ("h200"), or a slug of the driver's name for a card that is not in it.
        type: "cuda" or "cpu".
        title: the name as its maker or driver gives it.
        sm: compute capability as major * 10 + minor; None on a CPU.
        smem: bytes of shared memory that one program may use; None on a CPU.
        native_fp8: e4m3 casts and matrix products in hardware.
    """

    name: str
    type: Literal["cuda", "cpu"]
    title: str
    sm: int | None = None
    smem: int | None = None
    native_fp8: bool = False


def _gpu(name: str, title: str, sm: int, smem: int) -> DeviceInfo:
    return DeviceInfo(name=name, type="cuda", title=title, sm=sm, smem=smem, native_fp8=sm >= 89)


# Titles are the driver's, matched whole: a PCIe or laptop part of the same family is another device to measure, so it gets
# a name, and evidence, of its own.
_TABLE = {
    info.name: info
    for info in (
        _gpu("h200", "NVIDIA H200", 90, 232_448),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 90, 232_448),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 80, 166_912),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 86, 101_376),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 89, 101_376),
        _gpu("l40s", "NVIDIA L40S", 89, 101_376),
        _gpu("b200", "NVIDIA B200", 100, 232_448),
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", 120, 101_376),
        _gpu("t4", "Tesla T4", 75, 65_536),
        DeviceInfo(name="cpu", type="cpu", title="CPU"),
    )
}

# Shared memory a program may opt into, by compute capability; what nvidia-smi does not tell. Source: CUDA C++ Programming Guide.
_SMEM_BY_SM = {75: 65_536, 80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448}
_SMEM_UNKNOWN = 101_376  # the least of any card since sm80 that is not in the table above


def known_devices() -> tuple[str, ...]:
    """The names of the device table."""
    return tuple(_TABLE)


def device_info(name: str) -> DeviceInfo:
    """The entry ``name`` of the device table.

    Raises: ConfigError that names the nearest known device.
    """
    if name not in _TABLE:
        raise ConfigError("unknown device", got=repr(name), wanted=nearest(name, _TABLE), change="name a device of the table")
    return _TABLE[name]


@cache
def current_device(kind: str | None = None) -> DeviceInfo:
    """The device of this machine that torch would use. Imports torch.

    Args:
        kind: "cuda", "cuda:N", "cpu", or None for a GPU where there is one and the CPU otherwise.
    Raises: ConfigError when a GPU is asked for and there is none, and on any other kind.
    """
    if kind == "cpu":
        return _TABLE["cpu"]
    if kind is not None and not re.fullmatch(r"cuda(:\d+)?", kind):
        raise ConfigError("unknown device", got=repr(kind), wanted="cuda, cuda:N or cpu", change="name one of them")
    import torch

    # torch.version.cuda is None in a build for AMD, whose cards answer under the same name.
    count = torch.cuda.device_count() if torch.version.cuda is not None and torch.cuda.is_available() else 0
    if kind is None and not count:
        return _TABLE["cpu"]
    index = int(kind.partition(":")[2] or 0) if kind else 0
    if index >= count:
        raise ConfigError(
            "no such GPU",
            got=f"{kind!r}, torch {torch.__version__} sees {count} CUDA devices",
            wanted="one of them" if count else "a CUDA build of torch and a driver that answers nvidia-smi",
            change="ask for another index or for 'cpu'" if count else "ask for 'cpu' or repair the driver or torch",
        )
    return _from_properties(torch.cuda.get_device_properties(index))


MAX_GRID = (2**31 - 1, 65_535, 65_535)
"""The most programs on each axis of a launch, on every CUDA device."""

_simulated: ContextVar[DeviceInfo | None] = ContextVar("_simulated", default=None)


def launch_device(tensor: Any) -> DeviceInfo:
    """The device whose facts a launch on this torch tensor hangs on.

    For a tensor on a CPU, where kernels are interpreted or only compiled, that is the device of ``simulate_launches``, and the
    h200 outside of it.
    """
    if tensor.is_cuda:
        return current_device(f"cuda:{tensor.device.index}")
    return _simulated.get() or _TABLE["h200"]


@contextmanager
def simulate_launches(device: DeviceInfo) -> Iterator[None]:
    """Within it, launches on CPU tensors are those of ``device``."""
    token = _simulated.set(device)
    try:
        yield
    finally:
        _simulated.reset(token)


def _from_properties(properties: Any) -> DeviceInfo:
    """DeviceInfo of what torch.cuda.get_device_properties returns."""
    return _entry(properties.name, properties.major * 10 + properties.minor, properties.shared_memory_per_block_optin)


def _entry(title: str, sm: int, smem: int | None = None) -> DeviceInfo:
    """The table's entry of that title, or one made for a card that the table does not hold."""
    for info in _TABLE.values():
        if info.title == title:
            return info
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or f"sm{sm}"
    return _gpu(slug, title, sm, smem or _SMEM_BY_SM.get(sm, _SMEM_UNKNOWN))


def sm_version() -> int | None:
    """Compute capability of the current device as major * 10 + minor; None on a CPU."""
    return current_device(None).sm


def has_native_fp8() -> bool:
    """Whether the current device casts to and multiplies e4m3 in hardware."""
    return current_device(None).native_fp8


def smem_limit() -> int | None:
    """Bytes of shared memory that one program may use on the current device; None on a CPU."""
    return current_device(None).smem


@cache
def probe_device() -> DeviceInfo:
    """This machine's device as far as nvidia-smi tells, without torch: its first visible GPU, or the CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None or (visible is not None and visible.strip() in ("", "-1")):
        return _TABLE["cpu"]
    first = (visible or "0").split(",")[0].strip()
    query = ["nvidia-smi", f"--id={first}", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return _TABLE["cpu"]  # a driver that does not answer has no GPU to offer
    return _parse_smi(answer)


def _parse_smi(answer: str) -> DeviceInfo:
    """The first line of ``name, compute_cap`` in nvidia-smi's csv; the CPU when there is none."""
    found = re.match(r"\s*(.+?)\s*,\s*(\d+)\.(\d+)\s*$", answer.strip().splitlines()[0]) if answer.strip() else None
    return _entry(found[1], int(found[2]) * 10 + int(found[3])) if found else _TABLE["cpu"]


def is_this_machine(device: DeviceInfo) -> bool:
    """Whether ``device`` is in this machine, as far as can be told without torch."""
    return device.type == "cpu" or device == probe_device()
