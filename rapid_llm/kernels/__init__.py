"""Kernel tier: name -> module table, resolved on first use. Imports neither torch nor Triton."""

import importlib
from typing import Any

_EXPORTS = {
    "DeviceInfo": "device",
    "current_device": "device",
    "device_info": "device",
    "known_devices": "device",
    "has_native_fp8": "device",
    "sm_version": "device",
    "smem_limit": "device",
    "catalog": "dispatcher.catalog",
    "dispatch": "dispatcher.dispatch",
    "verified_elsewhere_summary": "dispatcher.dispatch",
    "Explanation": "dispatcher.explain",
    "explain": "dispatcher.explain",
    "Tile": "ops.tile_policy",
    "TileTier": "ops.tile_policy",
    "resolve_tiles": "ops.tile_policy",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value  # the next look-up is an ordinary one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
