"""Small tensors between host and device, such as a step needs: in one copy, and without the host waiting."""

import numpy as np
import torch

Ints = np.ndarray
"""Of int32."""


def aligned(size: int) -> int:
    """``size`` elements of int32, up to the next 16-byte boundary, where kernels like tensors to begin."""
    return size + -size % 4


def to_device(parts: tuple[Ints, ...], device: torch.device) -> list[torch.Tensor]:
    """All parts in one host-to-device copy; views of it, each aligned."""
    padded = [aligned(len(part)) for part in parts]
    packed = torch.zeros(sum(padded), dtype=torch.int32, pin_memory=device.type == "cuda")
    views, start = packed.numpy(), 0
    for part, size in zip(parts, padded, strict=True):
        views[start : start + len(part)] = part
        start += size
    on_device = torch.split(packed.to(device, non_blocking=True), padded)
    return [view[: len(part)] for view, part in zip(on_device, parts, strict=True)]


def to_pinned(values: torch.Tensor) -> torch.Tensor:
    """A copy in pinned host memory, on its way: pageable memory would have the host wait for it."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
