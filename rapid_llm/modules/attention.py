"""Attention over the paged pool: project, rotate, write K and V, then decode rows and prefill rows by their own kernels."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rapid_llm.config import PAGE_SIZE
from rapid_llm.modules.forward_batch import ForwardBatch, LayerPool
from rapid_llm.modules.linear import Linear
from rapid_llm.modules.norm import RMSNorm
from rapid_llm.modules.placement import Placement
from rapid_llm.modules.rotary import Rotary
from rapid_llm.quantization.w8a8 import Activations
from rapid_llm.weights import WeightSlot


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


class Attention:
    """Grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).

    Q, K and V come from one product and stay views of it; every kernel takes them by strides.
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
        self._rope = place.kernel("rope", **heads, rotary_dim=rotary.rotary_dim)
        self._write_kv = place.kernel("update_kv_buffer", num_kv_heads=num_kv_heads, head_dim=head_dim)
        # One kernel for all rows where bits must not hang on which of the two a token comes to: such batches have no decodes.
        self._decode = None if place.deterministic else place.kernel("flash_decoding", **heads, page_size=PAGE_SIZE)
        self._prefill = place.kernel("flashattention2_nopad", **heads, page_size=PAGE_SIZE)

    def __call__(self, x: Activations, batch: ForwardBatch, pool: LayerPool) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]; writes the step's rows of ``pool``."""
        projected = self.qkv(x)
        heads = projected.view(len(projected), -1, self.head_dim)
        first_k, first_v = self.num_heads, self.num_heads + self.num_kv_heads
        q, k, v = heads[:, :first_k], heads[:, first_k:first_v], heads[:, first_v:]
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.over(q)
            self.k_norm.over(k)
        self._rope(q, k, batch.positions, self.cos_sin)
        self._write_kv(k, v, batch.slot_mapping, k_pool=pool.k, v_pool=pool.v)
        attended = projected.new_empty(len(projected), self.num_heads * self.head_dim)
        self._attend(q, pool, batch, attended.view(q.shape))
        return self.out(attended)

    def _attend(self, q: torch.Tensor, pool: LayerPool, batch: ForwardBatch, out: torch.Tensor) -> None:
        """q, out: [T, num_heads, head_dim]. Decodes first: they write zeros where there is none, which a chunk may write over."""
        decodes, pools, table = batch.num_decodes, (pool.k, pool.v), batch.page_table
        scale = {"page_size": PAGE_SIZE, "sm_scale": self.sm_scale}
        if decodes and self._decode is not None:
            self._decode(q[:decodes], *pools, table, batch.decode_rows, batch.decode_lens, out=out[:decodes], **scale)
        if batch.longest_chunk:
            chunks = (batch.chunk_rows, batch.chunk_bounds, batch.chunk_lens)
            self._prefill(q, *pools, table, *chunks, out=out, max_seqlen_q=batch.longest_chunk, **scale)

    def weights(self) -> Iterator[WeightSlot]:
        """Both projections', and those of the norms of q and k where there are any."""
        yield from self.qkv.weights()
        yield from self.out.weights()
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                yield from norm.weights()
