"""The tensors of one packed step. Lives where it is read; passed as an argument from worker to kernel."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class LayerPool(NamedTuple):
    """K and V rows of one layer, [rows, num_kv_heads, head_dim] each: the two halves of one buffer."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T packed tokens of D decodes (one token each, first) and P prefill chunks, all indices int32 on the device.

    Attributes:
        token_ids, positions, slot_mapping: [T]; slot_mapping is the pool row that the token's K and V go to.
        num_decodes: D.
        table_rows: [D + P] row of each sequence in ``page_table``.
        seq_lens: [D + P] keys of each sequence, this step's included.
        cu_seqlens_q: [P + 1] bounds of the prefill chunks, from the first prefill token.
        max_seqlen_q: longest prefill chunk, on the host; 0 without one.
        page_table: [slots, pages] of the whole engine.
        sampled_rows: [S] packed index of each token whose logits are wanted, its successor being sampled or scored; ascending.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    table_rows: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    page_table: torch.Tensor
    sampled_rows: torch.Tensor
