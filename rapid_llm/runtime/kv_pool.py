"""The K and V tensors of all layers, and the bound on their size that the kernels reading them declare."""

from collections.abc import Iterable

import torch

from rapid_llm.config import PAGE_SIZE
from rapid_llm.errors import ConfigError
from rapid_llm.kernels.ops.interfaces import KernelSpec
from rapid_llm.modules.forward_batch import LayerPool
from rapid_llm.runtime.kv_scales import KVScales

MAX_ROWS = 2**31
"""Row ids are int32."""


class KVPool:
    """Per layer one buffer [rows, 2 * num_kv_heads, head_dim], K heads first; a token's row id is its slot.

    Memory is touched when a row is first written, so a large pool costs a host nothing until it is used.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        scales: KVScales | None = None,
    ) -> None:
        """``shape``: layers, pages, KV heads, head dimension. ``scales``: of a pool of e4m3."""
        num_layers, num_pages, num_kv_heads, head_dim = shape
        layer = (num_pages * PAGE_SIZE, 2 * num_kv_heads, head_dim)
        self.buffers = [torch.empty(layer, dtype=dtype, device=device) for _ in range(num_layers)]
        by_layer = [{}] * num_layers if scales is None else scales.by_layer(device)
        self.layers = [
            LayerPool(buffer[:, :num_kv_heads], buffer[:, num_kv_heads:], each)
            for buffer, each in zip(self.buffers, by_layer, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)


def check_bound(num_rows: int, row_elements: int, readers: Iterable[KernelSpec]) -> None:
    """Refuse a pool that one of its kernels could not address.

    Args:
        num_rows: rows of one layer.
        row_elements: elements of one row, K and V.
        readers: the rows chosen for the ops that multiply a row id by the row stride.

    Raises:
        ConfigError: names the kernel and the most rows it can serve.
    """
    for spec in readers:
        # An int32 kernel multiplies in 32 bits: the last element's offset must fit.
        most = MAX_ROWS if spec.int64_rows else MAX_ROWS // row_elements
        if num_rows > most:
            wanted = f"at most {most:,} rows of {row_elements:,} elements, which is what {spec.name} can address"
            raise ConfigError("the KV pool is too large", got=f"{num_rows:,} rows", wanted=wanted, change="lower max_kv_tokens")
