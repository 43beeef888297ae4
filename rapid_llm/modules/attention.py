"""Attention over the paged pool: project, rotate, write K and V, then decode rows and prefill rows by their own kernels."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rapid_llm.config import PAGE_SIZE
from rapid_llm.modules.forward_batch import ForwardBatch, LayerPool
from rapid_llm.modules.linear import Linear
from rapid_llm.modules.norm import RMSNorm
from rapid_llm.modules.placement import BoundBySize, BoundKernel, Placement
from rapid_llm.modules.rotary import Rotary
from rapid_llm.quantization.w8a8 import Activations
from rapid_llm.weights import WeightSlot

Kernel = BoundKernel | BoundBySize


@dataclass(frozen=True)
class AttentionSizes:
    """What one attention layer is made of.

    Attributes:
        hidden_size: width of its input and output.
        num_heads, num_kv_heads, head_dim: query heads, key-value heads (a divisor), width of each.
        qkv_bias, o_bias: whether the projections have biases.
        qk_norm_eps: epsilon of the RMS norm that every head of q and k goes through before it is rotated; None without one.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm_eps: float | None = None


class _PoolKernels(NamedTuple):
    """What reads and writes one kind of pool. Without ``rope`` the write norms and rotates as well."""

    rope: Kernel | None
    write: Kernel
    decode: Kernel | None
    prefill: Kernel

    @classmethod
    def bind(cls, place: Placement, kind: str, heads: dict[str, int], rotary_dim: int, fused: str | None) -> "_PoolKernels":
        """Those of ops whose names end in ``kind``; the fused write of this name, if there is any and it is native here."""
        # One kernel for all rows where bits must not hang on which of the two a token comes to: such batches have no decodes.
        decode = None if place.deterministic else place.kernel(f"flash_decoding{kind}", **heads, page_size=PAGE_SIZE)
        prefill = place.kernel(f"flashattention2_nopad{kind}", **heads, page_size=PAGE_SIZE)
        if fused is not None and place.is_native(fused, **heads):
            return cls(None, place.kernel(fused, **heads), decode, prefill)
        kv = {name: heads[name] for name in ("num_kv_heads", "head_dim")}
        rope = place.kernel("rope", **heads, rotary_dim=rotary_dim)
        return cls(rope, place.kernel(f"update_kv_buffer{kind}", **kv), decode, prefill)


class Attention:
    """Grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).

    Q, K and V come from one product and stay views of it; every kernel takes them by strides. Where the pool is e4m3, a pool
    without scales is still served, which is what these are measured on.
    """

    def __init__(self, place: Placement, name: str, rotary: Rotary, sizes: AttentionSizes) -> None:
        num_heads, num_kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.sm_scale = head_dim**-0.5
        self.cos_sin = rotary.cos_sin
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        parts = [(f"{name}.q_proj", q_size), (f"{name}.k_proj", kv_size), (f"{name}.v_proj", kv_size)]
        self.qkv = Linear(place, parts, sizes.hidden_size, bias=sizes.qkv_bias)
        self.out = Linear(place, [(f"{name}.o_proj", sizes.hidden_size)], q_size, bias=sizes.o_bias)
        self.q_norm = self.k_norm = None
        if sizes.qk_norm_eps is not None:
            self.q_norm = RMSNorm(place, f"{name}.q_norm", head_dim, sizes.qk_norm_eps)
            self.k_norm = RMSNorm(place, f"{name}.k_norm", head_dim, sizes.qk_norm_eps)
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        fused = None
        if rotary.rotary_dim == head_dim:  # it rotates whole heads
            fused = "rope_kv_write" if sizes.qk_norm_eps is None else "qk_norm_rope_kv_write"
        self._plain = _PoolKernels.bind(place, "", heads, rotary.rotary_dim, fused)
        self._fp8 = None if place.kv_dtype is None else _PoolKernels.bind(place, "_fp8", heads, rotary.rotary_dim, None)

    def __call__(self, x: Activations, batch: ForwardBatch, pool: LayerPool) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]; writes the step's rows of ``pool``."""
        projected = self.qkv(x)
        heads = projected.view(len(projected), -1, self.head_dim)
        first_k, first_v = self.num_heads, self.num_heads + self.num_kv_heads
        q, k, v = heads[:, :first_k], heads[:, first_k:first_v], heads[:, first_v:]
        kernels = self._fp8 if self._fp8 is not None and pool.scales else self._plain
        self._write(kernels, q, k, v, batch, pool)
        attended = projected.new_empty(len(projected), self.num_heads * self.head_dim)
        self._attend(kernels, q, pool, batch, attended.view(q.shape))
        return self.out(attended)

    def _write(
        self, kernels: _PoolKernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, pool: LayerPool
    ) -> None:
        """Norm and rotate q [T, num_heads, head_dim] in place; k and v [T, num_kv_heads, head_dim] go into the pool."""
        q_norm, k_norm, pools = self.q_norm, self.k_norm, {"k_pool": pool.k, "v_pool": pool.v}
        places = (batch.positions, self.cos_sin, batch.slot_mapping)
        if kernels.rope is not None:
            if q_norm is not None and k_norm is not None:
                q_norm.over(q)
                k_norm.over(k)
            kernels.rope(q, k, batch.positions, self.cos_sin)
            kernels.write(k, v, batch.slot_mapping, **pools, **pool.scales)
        elif q_norm is not None and k_norm is not None:
            kernels.write(q, k, v, q_norm.weight, k_norm.weight, *places, **pools, eps=q_norm.eps)
        else:
            kernels.write(q, k, v, *places, **pools)

    def _attend(self, kernels: "_PoolKernels", q: torch.Tensor, pool: LayerPool, batch: ForwardBatch, out: torch.Tensor) -> None:
        """q, out: [T, num_heads, head_dim]. Decodes first: they write zeros where there is none, which a chunk may write over."""
        decodes, pools, table = batch.num_decodes, (pool.k, pool.v), batch.page_table
        scale = {"page_size": PAGE_SIZE, "sm_scale": self.sm_scale, **pool.scales}
        if decodes and kernels.decode is not None:
            kernels.decode(q[:decodes], *pools, table, batch.decode_rows, batch.decode_lens, out=out[:decodes], **scale)
        if batch.longest_chunk:
            chunks = (batch.chunk_rows, batch.chunk_bounds, batch.chunk_lens)
            kernels.prefill(q, *pools, table, *chunks, out=out, max_seqlen_q=batch.longest_chunk, **scale)

    def weights(self) -> Iterator[WeightSlot]:
        """Both projections', and those of the norms of q and k where there are any."""
        yield from self.qkv.weights()
        yield from self.out.weights()
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                yield from norm.weights()
