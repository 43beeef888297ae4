"""KV writes, one token or entry at a time."""

import torch

from rapid_llm.kernels.reference.quantization.fp8 import nearest_e4m3


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


def update_kv_buffer_fp8(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The e4m3 numbers of the pools after the write, float64 [num_rows, Hkv, D] each; ids outside the pool are skipped.

    The quotient is rounded to fp32, then to e4m3. What is not finite becomes NaN.
    """
    new = [pool.float().double() for pool in (k_pool, v_pool)]
    for pool, values, scale in zip(new, (k, v), (k_scale, v_scale), strict=True):
        for token, row in enumerate(slot_mapping.tolist()):
            if 0 <= row < len(pool):
                wide = values[token].double()
                quotients = (torch.where(wide.isfinite(), wide, 0.0) / scale.double()[:, None]).float().double()
                pool[row] = torch.where(wide.isfinite(), nearest_e4m3(quotients.clamp(-448.0, 448.0)), torch.nan)
    return new[0], new[1]


def update_kv_index(
    page_table: torch.Tensor, table_rows: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    """The page table after the write, int32 [S, P]; entries outside the table are skipped."""
    table = page_table.clone()
    for row, column, page in zip(table_rows.tolist(), columns.tolist(), pages.tolist(), strict=True):
        if 0 <= row < table.shape[0] and 0 <= column < table.shape[1]:
            table[row, column] = page
    return table
