"""Attention over the paged pool: project, rotate, write K and V, then decode rows and prefill rows by their own kernels."""

from collections.abc import Iterator

import torch

from rapid_llm.config import PAGE_SIZE
from rapid_llm.modules.forward_batch import ForwardBatch
from rapid_llm.modules.linear import Linear
from rapid_llm.modules.placement import Placement
from rapid_llm.modules.rotary import Rotary
from rapid_llm.modules.weights import WeightSlot


class Attention:
    """Grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).

    Q, K and V come from one product and stay views of it; every kernel takes them by strides.
    """

    def __init__(
        self,
        place: Placement,
        name: str,
        rotary: Rotary,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.sm_scale = head_dim**-0.5
        self.cos_sin = rotary.cos_sin
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        parts = [(f"{name}.q_proj", q_size), (f"{name}.k_proj", kv_size), (f"{name}.v_proj", kv_size)]
        self.qkv = Linear(place, parts, hidden_size, bias=bias)
        self.out = Linear(place, [(f"{name}.o_proj", hidden_size)], q_size, bias=bias)
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        self._rope = place.kernel("rope", **heads, rotary_dim=rotary.rotary_dim)
        self._write_kv = place.kernel("update_kv_buffer", num_kv_heads=num_kv_heads, head_dim=head_dim)
        self._decode = place.kernel("flash_decoding", **heads, page_size=PAGE_SIZE)
        self._prefill = place.kernel("flashattention2_nopad", **heads, page_size=PAGE_SIZE)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, pool: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]; writes this layer's ``pool`` [rows, 2 * num_kv_heads, head_dim]."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        k_pool, v_pool = pool[:, : self.num_kv_heads], pool[:, self.num_kv_heads :]
        self._rope(q, k, batch.positions, self.cos_sin)
        self._write_kv(k, v, batch.slot_mapping, k_pool=k_pool, v_pool=v_pool)
        return self.out(self._attend(q, k_pool, v_pool, batch).flatten(1))

    def _attend(self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = q.new_empty(q.shape)  # [T, num_heads, head_dim]
        num_decodes, page_table = batch.num_decodes, batch.page_table
        rows, lens = batch.table_rows, batch.seq_lens
        if num_decodes:
            self._decode(
                q[:num_decodes],
                k_pool,
                v_pool,
                page_table,
                rows[:num_decodes],
                lens[:num_decodes],
                out=out[:num_decodes],
                page_size=PAGE_SIZE,
                sm_scale=self.sm_scale,
            )
        if batch.max_seqlen_q:
            self._prefill(
                q[num_decodes:],
                k_pool,
                v_pool,
                page_table,
                rows[num_decodes:],
                batch.cu_seqlens_q,
                lens[num_decodes:],
                out=out[num_decodes:],
                page_size=PAGE_SIZE,
                sm_scale=self.sm_scale,
                max_seqlen_q=batch.max_seqlen_q,
            )
        return out

    def weights(self) -> Iterator[WeightSlot]:
        """Both projections'."""
        yield from self.qkv.weights()
        yield from self.out.weights()
