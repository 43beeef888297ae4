"""What the memory of a GPU went to: noted part by part at the start, and adding up to what the driver says is in use."""

import torch


class MemoryBudget:
    """Counts what torch has taken from the driver between one ``note`` and the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: dict[str, int] = {}
        self._counted = torch.cuda.memory_reserved(device)

    def note(self, part: str) -> None:
        """What was taken since the last note is ``part``."""
        reserved = torch.cuda.memory_reserved(self._device)
        self._parts[part] = reserved - self._counted
        self._counted = reserved

    def to_text(self) -> str:
        """A line in GB. What torch has not taken is the CUDA context, loaded kernels, and other programs."""
        free, total = torch.cuda.mem_get_info(self._device)
        used = total - free
        parts = self._parts | {"CUDA, kernels and other programs": used - self._counted}
        listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
        return f"GPU memory, GB: {listed}; {used / 1e9:.2f} of {total / 1e9:.2f} in use, {free / 1e9:.2f} free"
