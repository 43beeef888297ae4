"""KV writes, one token or entry at a time."""

import torch


def update_kv_buffer(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pools after the write, float64 [num_rows, Hkv, D] each; ids outside the pool are skipped."""
    new_k, new_v = k_pool.double().clone(), v_pool.double().clone()
    for token, row in enumerate(slot_mapping.tolist()):
        if 0 <= row < len(new_k):
            new_k[row] = k[token].double()
            new_v[row] = v[token].double()
    return new_k, new_v


def update_kv_index(
    page_table: torch.Tensor, table_rows: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    """The page table after the write, int32 [S, P]; entries outside the table are skipped."""
    table = page_table.clone()
    for row, column, page in zip(table_rows.tolist(), columns.tolist(), pages.tolist(), strict=True):
        if 0 <= row < table.shape[0] and 0 <= column < table.shape[1]:
            table[row, column] = page
    return table
