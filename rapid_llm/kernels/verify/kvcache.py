"""Cases of the kvcache family: every row and entry is checked, the selected ones and all others."""

import torch

from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.ops.kvcache.rows import UPDATE_KV_BUFFER, UPDATE_KV_INDEX
from rapid_llm.kernels.reference import kvcache as reference
from rapid_llm.kernels.verify.buffers import Stage
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check

_INT32_MAX = (1 << 31) - 1


def _update_kv_buffer(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None
) -> Case:
    stage = Stage(UPDATE_KV_BUFFER, sizes, dtype, device)
    num_tokens, num_rows = sizes["num_tokens"], sizes["num_rows"]
    row_shape = (sizes["num_kv_heads"], sizes["head_dim"])
    slots = torch.randperm(num_rows, generator=generator)[:num_tokens]  # in no order
    if hard == "padding_slots":
        outside = torch.tensor([-1, num_rows, _INT32_MAX, -(1 << 31), num_rows + 1])
        padded = torch.arange(num_tokens) % 2 == 0
        slots = torch.where(padded, outside[torch.arange(num_tokens) // 2 % len(outside)], slots)
    k = stage.place("k", torch.randn(num_tokens, *row_shape, generator=generator))
    v = stage.place("v", torch.randn(num_tokens, *row_shape, generator=generator))
    slot_mapping = stage.place("slot_mapping", slots)
    k_pool, v_pool = stage.place_pools(
        torch.randn(num_rows, *row_shape, generator=generator), torch.randn(num_rows, *row_shape, generator=generator)
    )
    expected_k, expected_v = reference.update_kv_buffer(k, v, slot_mapping, k_pool=k_pool, v_pool=v_pool)
    checks = [  # a copy is exact
        Check("k_pool", lambda: k_pool, expected_k, rtol=0.0, atol=0.0),
        Check("v_pool", lambda: v_pool, expected_v, rtol=0.0, atol=0.0),
    ]
    arguments = {"k": k, "v": v, "slot_mapping": slot_mapping, "k_pool": k_pool, "v_pool": v_pool}
    return Case(hard or "random", arguments, [*checks, *stage.guards()])


def _update_kv_index(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None
) -> Case:
    stage = Stage(UPDATE_KV_INDEX, sizes, dtype, device)
    num_updates, num_rows, num_columns = sizes["num_updates"], sizes["num_table_rows"], sizes["num_columns"]
    cells = torch.randperm(num_rows * num_columns, generator=generator)[:num_updates]
    rows, columns = cells // num_columns, cells % num_columns
    if hard == "padding_entries":
        rows[::3] = torch.tensor([-1, num_rows, _INT32_MAX])[torch.arange(len(rows[::3])) % 3]
        columns[1::3] = torch.tensor([-1, num_columns, _INT32_MAX])[torch.arange(len(columns[1::3])) % 3]
    arguments = {
        "page_table": stage.place("page_table", torch.full((num_rows, num_columns), -5)),
        "table_rows": stage.place("table_rows", rows),
        "columns": stage.place("columns", columns),
        "pages": stage.place("pages", torch.randint(0, _INT32_MAX, (num_updates,), generator=generator)),
    }
    check = Check("page_table", lambda: arguments["page_table"], reference.update_kv_index(**arguments), rtol=0.0, atol=0.0)
    return Case(hard or "random", dict(arguments), [check, *stage.guards()])


CASES: dict[str, CaseMaker] = {"update_kv_buffer": _update_kv_buffer, "update_kv_index": _update_kv_index}
