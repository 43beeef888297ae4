"""The tensors of one packed step. Lives where it is read; passed as an argument from worker to kernel."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch


class LayerPool(NamedTuple):
    """K and V rows of one layer, [rows, num_kv_heads, head_dim] each: the two halves of one buffer.

    ``scales`` are of a pool of e4m3: what its numbers are multiplied by, "k_scale" and "v_scale", fp32 [num_kv_heads].
    """

    k: torch.Tensor
    v: torch.Tensor
    scales: Mapping[str, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T packed tokens: decodes, one token each, then P prefill chunks, then padding. All indices int32 on the device.

    D is the number of decodes, or more: those that are none have 0 keys. Their rows may be a chunk's, which is attended after.

    Attributes:
        token_ids, positions, slot_mapping: [T]; slot_mapping is the pool row that the token's K and V go to, -1 for none.
        decode_rows, decode_lens: [D] row of each decode in ``page_table``, and its keys, this step's included.
        chunk_rows, chunk_lens: [P] the same of each prefill chunk.
        chunk_bounds: [P + 1] where chunks begin and end among the packed tokens.
        longest_chunk: tokens that no chunk has more of, on the host; 0 without one.
        page_table: [slots, pages] of the whole engine.
        sampled_rows: [S] packed index of each token whose logits are wanted, its successor being sampled or scored; ascending.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    decode_rows: torch.Tensor
    decode_lens: torch.Tensor
    chunk_rows: torch.Tensor
    chunk_lens: torch.Tensor
    chunk_bounds: torch.Tensor
    longest_chunk: int
    page_table: torch.Tensor
    sampled_rows: torch.Tensor

    @property
    def num_decodes(self) -> int:
        """D."""
        return self.decode_rows.shape[0]
