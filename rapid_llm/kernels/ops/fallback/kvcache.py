"""KV writes in plain torch: token rows into the pool, page numbers into the page table. Out-of-range ids are skipped."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rapid_llm.kernels.ops.kvcache.fp8_inputs import check_update_kv_buffer_fp8
from rapid_llm.kernels.ops.kvcache.inputs import check_update_kv_buffer, check_update_kv_index


def update_kv_buffer(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> None:
    """Copy token t's K and V into row slot_mapping[t] of the pools; ids below 0 or past the last row are skipped.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], fp32 | bf16 | fp16; inner stride 1, the others free.
        slot_mapping: [num_tokens], int32; those inside the pool distinct, in any order; stride 1.
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], same dtype; usually the two head halves of one
            [num_rows, 2 * num_kv_heads, head_dim] buffer; inner stride 1, the others free. Only the named rows are written.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/kvcache.py::update_kv_buffer. Origin: this repo.
    """
    check_update_kv_buffer(k, v, slot_mapping, k_pool, v_pool)
    _write(k, v, slot_mapping, k_pool, v_pool)


def update_kv_buffer_fp8(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write token t's K and V, divided by the scales and rounded to the nearest e4m3, into row slot_mapping[t] of the pools.

    Ids below 0 or past the last row are skipped. Finite values past +-448 scales become +-448. NaN stays NaN, and so does an
    infinity, which e4m3 has not.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], fp32 | bf16 | fp16; inner stride 1, the others free.
        slot_mapping: [num_tokens], int32; those inside the pool distinct, in any order; stride 1.
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], float8_e4m3fn; inner stride 1, the others free. Only the named rows
            are written.
        k_scale, v_scale: [num_kv_heads], fp32, above 0, which is not looked at; stride 1.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/kvcache.py::update_kv_buffer_fp8. Origin: this repo.
    """
    check_update_kv_buffer_fp8(k, v, slot_mapping, k_pool, v_pool, k_scale, v_scale)
    pools = (pool.view(torch.uint8) for pool in (k_pool, v_pool))  # what indexes rows knows bytes and no e4m3
    _write(_e4m3_bytes(k, k_scale), _e4m3_bytes(v, v_scale), slot_mapping, *pools)


def _e4m3_bytes(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """values [T, H, D] / scale [H] as bytes of e4m3, each [T, H, D]."""
    quotients = (values.float() / scale[:, None]).clamp_(-448.0, 448.0)
    return torch.where(values.isfinite(), quotients, torch.nan).to(torch.float8_e4m3fn).view(torch.uint8)


def _write(k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    """Copy rows of the pools' dtype into them."""
    if not k.shape[0]:
        return
    if k.shape[0] == 1 and not k.is_cuda:  # a decode step on a CPU: two plain copies
        _write_row(k[0], slot_mapping, k_pool)
        _write_row(v[0], slot_mapping, v_pool)
        return
    low, high = torch.aminmax(slot_mapping)
    if low < 0 or high >= k_pool.shape[0]:  # rare: only a padded step pays for the selection
        kept = ((slot_mapping >= 0) & (slot_mapping < k_pool.shape[0])).nonzero().view(-1)
        k, v, slot_mapping = (tensor.index_select(0, kept) for tensor in (k, v, slot_mapping))
    rows = slot_mapping.long()
    k_pool.index_copy_(0, rows, k)
    v_pool.index_copy_(0, rows, v)


def prepare_update_kv_buffer(
    shared: dict[Any, Any],
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> tuple[Callable[[], object], ...]:
    """The call that repeats ``update_kv_buffer`` on the same tensors; none of its own for more than a token."""
    if k.shape[0] != 1 or k.is_cuda:
        return ()
    heads, dim = k.shape[1:]
    if _follows(v, k) and _follows(v_pool, k_pool):  # K and V side by side on both ends: one copy
        source, rows = (
            k[0].as_strided((2 * heads, dim), k.stride()[1:]),
            k_pool.as_strided((k_pool.shape[0], 2 * heads, dim), k_pool.stride()),
        )
        return (partial(_write_row, source, slot_mapping, rows),)
    return partial(_write_row, k[0], slot_mapping, k_pool), partial(_write_row, v[0], slot_mapping, v_pool)


def _follows(second: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether the heads of ``second`` lie right behind those of ``first`` in one allocation, both [rows, heads, head_dim]."""
    distance = first.shape[1] * first.stride(1) * first.element_size()
    one_allocation = second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    return one_allocation and second.stride() == first.stride() and second.data_ptr() == first.data_ptr() + distance


def _write_row(source: torch.Tensor, slot: torch.Tensor, pool: torch.Tensor) -> None:
    """Write one token's heads [H, D] into the row that ``slot`` [1] names, unless it names none."""
    row = int(slot.item())
    if 0 <= row < pool.shape[0]:
        pool.select(0, row).copy_(source)


def update_kv_index(page_table: torch.Tensor, table_rows: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor) -> None:
    """Set page_table[table_rows[i], columns[i]] = pages[i]; entries with a row or column outside the table are skipped.

    Args:
        page_table: [num_table_rows, num_columns], int32; written; inner stride 1, row stride free.
        table_rows, columns, pages: [num_updates], int32; no (row, column) twice; stride 1.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/kvcache.py::update_kv_index. Origin: this repo.
    """
    check_update_kv_index(page_table, table_rows, columns, pages)
    if not pages.shape[0]:
        return
    num_rows, num_columns = page_table.shape
    inside = (table_rows >= 0) & (table_rows < num_rows) & (columns >= 0) & (columns < num_columns)
    kept = inside.nonzero().view(-1)
    where = (table_rows.index_select(0, kept).long(), columns.index_select(0, kept).long())
    page_table.index_put_(where, pages.index_select(0, kept))
