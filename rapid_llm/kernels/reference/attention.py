"""Attention in float64, one sequence and one head at a time, every key looked up through the page table."""

from dataclasses import dataclass

import torch


def flashattention2_nopad(
    q: torch.Tensor,
    k_pool: "torch.Tensor | _Numbers",
    v_pool: "torch.Tensor | _Numbers",
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    sm_scale: float,
) -> torch.Tensor:
    """Causal attention of packed prompts whose queries are the last of their keys: float64 [T, Hq, D], nobody's rows 0."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for sequence in range(len(table_rows)):
        start, end = int(cu_seqlens_q[sequence]), int(cu_seqlens_q[sequence + 1])
        num_keys = int(seq_lens[sequence])
        if start == end:
            continue
        rows = _pool_rows(page_table[int(table_rows[sequence])], num_keys, page_size)
        positions = torch.arange(num_keys - (end - start), num_keys, device=q.device)
        visible = torch.arange(num_keys, device=q.device)[None] <= positions[:, None]  # [Tq, Tk]
        out[start:end] = _attend(q[start:end], k_pool[rows], v_pool[rows], visible, sm_scale)
    return out


def flash_decoding(
    q: torch.Tensor,
    k_pool: "torch.Tensor | _Numbers",
    v_pool: "torch.Tensor | _Numbers",
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    sm_scale: float,
) -> torch.Tensor:
    """Attention of one query a sequence over all its keys: float64 [B, Hq, D], zeros where there are none."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for sequence, num_keys in enumerate(seq_lens.tolist()):
        if num_keys:
            rows = _pool_rows(page_table[int(table_rows[sequence])], num_keys, page_size)
            visible = torch.ones(1, num_keys, dtype=torch.bool, device=q.device)
            out[sequence] = _attend(q[sequence : sequence + 1], k_pool[rows], v_pool[rows], visible, sm_scale)[0]
    return out


def flashattention2_nopad_fp8(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> torch.Tensor:
    """As flashattention2_nopad over the pools' numbers times their head's scale."""
    pools = _Numbers(k_pool, k_scale), _Numbers(v_pool, v_scale)
    sequences = (page_table, table_rows, cu_seqlens_q, seq_lens)
    return flashattention2_nopad(q, *pools, *sequences, page_size=page_size, sm_scale=sm_scale)


def flash_decoding_fp8(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> torch.Tensor:
    """As flash_decoding over the pools' numbers times their head's scale."""
    pools = _Numbers(k_pool, k_scale), _Numbers(v_pool, v_scale)
    return flash_decoding(q, *pools, page_table, table_rows, seq_lens, page_size=page_size, sm_scale=sm_scale)


@dataclass(frozen=True)
class _Numbers:
    """What a pool of e4m3 stands for, in float64, of the rows that are asked for."""

    pool: torch.Tensor
    scale: torch.Tensor

    def __getitem__(self, rows: list[int]) -> torch.Tensor:
        numbers = torch.stack([self.pool[row].float() for row in rows])
        return numbers.double() * self.scale.double()[:, None]


def _pool_rows(table_row: torch.Tensor, num_keys: int, page_size: int) -> list[int]:
    """The pool row of every position."""
    pages = table_row.tolist()
    return [pages[position // page_size] * page_size + position % page_size for position in range(num_keys)]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """softmax(q k * sm_scale) v by head: q [Tq, Hq, D], k and v [Tk, Hkv, D], visible [Tq, Tk] -> [Tq, Hq, D]."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    heads_per_kv_head = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        keys, values = k[:, head // heads_per_kv_head].double(), v[:, head // heads_per_kv_head].double()
        scores = (q[:, head].double() @ keys.T) * sm_scale
        scores[~visible] = float("-inf")
        weights = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
        out[:, head] = (weights / weights.sum(dim=1, keepdim=True)) @ values
    return out
