"""Page numbers into the page table. Launch-bound, a scatter of single entries; one program, one warp, per entry."""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.kvcache.inputs import check_update_kv_index
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs


def update_kv_index(page_table: torch.Tensor, table_rows: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor) -> None:
    """Set page_table[table_rows[i], columns[i]] = pages[i]; entries with a row or column outside the table are skipped.

    Args:
        page_table: [num_table_rows, num_columns], int32; written; inner stride 1, row stride free.
        table_rows, columns, pages: [num_updates], int32; no (row, column) twice; stride 1.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/kvcache.py::update_kv_index. Origin: this repo.
    """
    check_update_kv_index(page_table, table_rows, columns, pages)
    if pages.shape[0]:
        _update_kv_index_kernel[(pages.shape[0],)](
            page_table,
            table_rows,
            columns,
            pages,
            page_table.stride(0),
            *page_table.shape,
            num_warps=1,
            num_stages=1,
            **dependent_launch(launch_device(pages)),
        )


@triton.jit
def _update_kv_index_kernel(
    page_table_ptr,
    table_rows_ptr,
    columns_ptr,
    pages_ptr,
    page_table_stride,
    num_table_rows,
    num_columns,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL, False)  # a page table is read early by those behind the next kernel, which so begins when this one ends
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(table_rows_ptr + entry).to(tl.int64)
    column = tl.load(columns_ptr + entry)
    page = tl.load(pages_ptr + entry)

    inside = (row >= 0) & (row < num_table_rows) & (column >= 0) & (column < num_columns)
    tl.store(page_table_ptr + row * page_table_stride + column, page, mask=inside)
