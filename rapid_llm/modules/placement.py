"""Where a model's tensors live and which kernels its layers bind: device, dtype, and dispatch for both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rapid_llm.kernels.device import DeviceInfo
from rapid_llm.kernels.dispatcher.dispatch import dispatch


@dataclass(frozen=True)
class Placement:
    """Passed to every layer's constructor.

    Attributes:
        info: what the device can do.
        device: where tensors go.
        dtype: of weights and activations.
    """

    info: DeviceInfo
    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """The dtype as kernel rows name it."""
        return str(self.dtype).removeprefix("torch.")

    def kernel(self, op: str, **sizes: int) -> Callable[..., Any]:
        """The row that serves ``op`` here, to be kept by the layer: no look-up on the step's path."""
        return dispatch(op, device=self.info, dtype=self.dtype_name, **sizes)

    def weight(self, *shape: int, transposed: bool = False) -> torch.Tensor:
        """A parameter of ``shape``, NaN until it is loaded.

        ``transposed`` stores a matrix column by column on a CPU, where one token's product then reads it at nearly the
        speed of a plain read, twice that of the other order.
        """
        if transposed and self.device.type == "cpu":
            return self.weight(*reversed(shape)).t()
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)
