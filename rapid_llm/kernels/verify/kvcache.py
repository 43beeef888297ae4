"""Cases of the kvcache family: every row and entry is checked, the selected ones and all others."""

import math
from typing import Any

import torch

from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.ops.kvcache.rows import UPDATE_KV_BUFFER, UPDATE_KV_BUFFER_FP8, UPDATE_KV_INDEX
from rapid_llm.kernels.reference import kvcache as reference
from rapid_llm.kernels.verify.buffers import Stage, scattered_slots
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check

_INT32_MAX = (1 << 31) - 1


_OUTLIERS = (448.0, 449.0, 464.0, 465.0, 480.0, 1e4, math.inf, -math.inf, math.nan, -448.25, 2.0**-10, 3 * 2.0**-11)
"""What e4m3 has no number for, beside what it has one for, in units of the scale."""


def _update_kv_buffer(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None
) -> Case:
    stage = Stage(UPDATE_KV_BUFFER, sizes, dtype, device)
    arguments = _placed_rows(stage, sizes, 1.0, generator, hard)
    return _write_case(stage, arguments, reference.update_kv_buffer(**arguments), hard)


def _update_kv_buffer_fp8(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None
) -> Case:
    stage = Stage(UPDATE_KV_BUFFER_FP8, sizes, dtype, device)
    heads = sizes["num_kv_heads"]
    exponents = torch.arange(heads) % 5 * 6 - 12 if hard == "far_scales" else torch.zeros(heads)
    scales = 2.0**exponents * (0.5 + torch.rand(2, heads, generator=generator)) / 64
    arguments = _placed_rows(stage, sizes, 100 * scales[:, None, :, None], generator, hard)
    if hard == "past_the_range":
        for values, scale in zip((arguments["k"], arguments["v"]), scales, strict=True):
            outliers = torch.tensor(_OUTLIERS)[torch.arange(values.numel()) % len(_OUTLIERS)].view(values.shape)
            values.copy_(outliers * scale[:, None])
    arguments |= {name: stage.place(name, scale) for name, scale in zip(("k_scale", "v_scale"), scales, strict=True)}
    return _write_case(stage, arguments, reference.update_kv_buffer_fp8(**arguments), hard)


def _placed_rows(
    stage: Stage, sizes: Sizes, spread: float | torch.Tensor, generator: torch.Generator, hard: str | None
) -> dict[str, Any]:
    """K and V of tokens, as wide as ``spread`` [2, 1, H, 1] says, their slots in no order, and pools."""
    num_tokens, num_rows = sizes["num_tokens"], sizes["num_rows"]
    row_shape = (sizes["num_kv_heads"], sizes["head_dim"])
    slots = scattered_slots(num_tokens, num_rows, generator, hard)
    k, v = torch.randn(2, num_tokens, *row_shape, generator=generator) * spread
    k_pool, v_pool = stage.place_pools(*torch.randn(2, num_rows, *row_shape, generator=generator))
    return {
        "k": stage.place("k", k),
        "v": stage.place("v", v),
        "slot_mapping": stage.place("slot_mapping", slots),
        "k_pool": k_pool,
        "v_pool": v_pool,
    }


def _write_case(stage: Stage, arguments: dict[str, Any], expected: tuple[torch.Tensor, torch.Tensor], hard: str | None) -> Case:
    """The same bits: a copy is exact, and so is the nearest number of a quotient that is rounded as IEEE says."""
    checks = [
        Check(name, lambda name=name: arguments[name].float(), pool, rtol=0.0, atol=0.0)  # type: ignore[misc]
        for name, pool in zip(("k_pool", "v_pool"), expected, strict=True)
    ]
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


CASES: dict[str, CaseMaker] = {
    "update_kv_buffer": _update_kv_buffer,
    "update_kv_buffer_fp8": _update_kv_buffer_fp8,
    "update_kv_index": _update_kv_index,
}
