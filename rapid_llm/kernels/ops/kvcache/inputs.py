"""What the rows of update_kv_buffer and update_kv_index ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_update_kv_buffer(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        not (k.dim() == k_pool.dim() == 3)
        or k.shape != v.shape
        or k_pool.shape != v_pool.shape
        or k.shape[1:] != k_pool.shape[1:]
        or slot_mapping.shape != k.shape[:1]
        or k.dtype not in _FLOATS
        or not (k.dtype == v.dtype == k_pool.dtype == v_pool.dtype)
        or slot_mapping.dtype != torch.int32
        or not (k.device == v.device == slot_mapping.device == k_pool.device == v_pool.device)
        or not (k.stride(2) == v.stride(2) == k_pool.stride(2) == v_pool.stride(2) == slot_mapping.stride(0) == 1)
    ):
        raise KernelInputError(
            describe("update_kv_buffer", k=k, v=v, slot_mapping=slot_mapping, k_pool=k_pool, v_pool=v_pool),
            wanted="k and v [num_tokens, num_kv_heads, head_dim], slot_mapping [num_tokens] int32, "
            "pools [num_rows, num_kv_heads, head_dim], one float dtype, inner stride 1",
            change="pass head views of the projections and the K and V halves of one layer's pool",
        )


def check_update_kv_index(page_table: torch.Tensor, table_rows: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        page_table.dim() != 2
        or table_rows.dim() != 1
        or not (table_rows.shape == columns.shape == pages.shape)
        or not (page_table.dtype == table_rows.dtype == columns.dtype == pages.dtype == torch.int32)
        or not (page_table.device == table_rows.device == columns.device == pages.device)
        or not (page_table.stride(1) == table_rows.stride(0) == columns.stride(0) == pages.stride(0) == 1)
    ):
        raise KernelInputError(
            describe("update_kv_index", page_table=page_table, table_rows=table_rows, columns=columns, pages=pages),
            wanted="page_table [num_table_rows, num_columns] and three [num_updates] lists, all int32, inner stride 1",
            change="pass int32 lists of one length",
        )
