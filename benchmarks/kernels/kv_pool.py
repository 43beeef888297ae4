"""KV pools as an engine has them after some hours: one buffer for K and V, pages in no order, others' pages in between.

A scatter is checked where it can go wrong: every token's row holds the token, and no other row of the pool holds anything.
"""

from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernels.cells import Cell
from benchmarks.kernels.microbench import Check, Function
from benchmarks.kernels.peers import combined
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.measure.serving import PAGE_SIZE
from rapid_llm.kernels.measure.timer import sets_for
from rapid_llm.kernels.measure.tuner import fallback_row
from rapid_llm.kernels.measure.workloads import Workload

SCATTERED, PAGES, PAST_INT32 = "scattered", "pages", "past_2^31"
"""Where a scatter's tokens go: each to a row of its own; 16 to a page, pages in no order; to rows past 2^31 elements too."""

_SEED = 20_261_129
_CHUNK = 1 << 17  # rows that are looked through at a time
_ROUNDED_TWICE = 1e-2  # of what is normed or rotated in bfloat16 by launches of their own


def scatter_workload(cell: Cell, device: str) -> Workload:
    """A write of ``cell``'s tokens to one pool of zeros, in several sets, each with slots of its own."""
    s, dtype = cell.sizes, getattr(torch, cell.dtype)
    tokens, heads, dim, rows = s["num_tokens"], s["num_kv_heads"], s["head_dim"], s["num_rows"]
    generator = torch.Generator(device).manual_seed(_SEED)
    buffer = torch.zeros(rows, 2 * heads, dim, dtype=dtype, device=device)
    set_bytes = cell.cost.read + cell.cost.written
    sets = []
    for _ in range(sets_for(set_bytes)):
        # K and V as they leave the fused projection: side by side in one row.
        projected = torch.empty(tokens, 2 * heads, dim, dtype=dtype, device=device).normal_(generator=generator)
        slots = slots_of(cell.variant, tokens, rows, generator)
        sets.append(
            {
                "k": projected[:, :heads],
                "v": projected[:, heads:],
                "slot_mapping": slots,
                "k_pool": buffer[:, :heads],
                "v_pool": buffer[:, heads:],
            }
        )
    return Workload(cell.op, cell.dtype, dict(s), cell.variant, tuple(sets), set_bytes, {})


def slots_of(variant: str, tokens: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct slots [tokens], int32, of a pool of ``rows``. Of PAST_INT32 the pool's last row is the first token's."""
    device = generator.device
    if variant == PAGES:
        pages = torch.randperm(rows // PAGE_SIZE, generator=generator, device=device)[: -(-tokens // PAGE_SIZE)]
        slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).view(-1)[:tokens]
        return slots.to(torch.int32)
    slots = torch.randperm(rows, generator=generator, device=device)[:tokens]
    if variant == PAST_INT32:
        slots = torch.where(slots == rows - 1, slots[0], slots)  # whoever had the last row takes the first one's
        slots[0] = rows - 1
    return slots.to(torch.int32)


def gate(cell: Cell, work: Workload) -> Check:
    """The check of a scatter: bits in the rows that slot_mapping names, zeros in all others. The pool is as new afterwards."""
    arguments = work.sets[0]
    buffer = combined(arguments["k_pool"], cell.sizes["num_kv_heads"])

    def problem(arm: str, function: Function) -> str:
        buffer.zero_()
        function(**arguments)
        found = landed(buffer, arguments)
        clear(buffer, arguments["slot_mapping"])
        return found

    return problem


def rotated_gate(cell: Cell, work: Workload) -> Check:
    """The check of a write that rotates first: queries and named rows near those of plain torch, zeros in all others.

    K is only read by some arms and rotated in place by others, so it is as new before each.
    """
    arguments = work.sets[0]
    buffer, fresh = combined(arguments["k_pool"], cell.sizes["num_kv_heads"]), arguments["k"].clone()

    def results(function: Function) -> tuple[torch.Tensor, torch.Tensor, int]:
        work.reset()
        arguments["k"].copy_(fresh)
        buffer.zero_()
        function(**arguments)
        rows = buffer[arguments["slot_mapping"].long()]
        queries, written = arguments["q"].clone(), rows_with_content(buffer)
        clear(buffer, arguments["slot_mapping"])
        return queries, rows, written

    wanted_q, wanted_rows, _ = results(load_target(fallback_row(cell.op)))

    def problem(arm: str, function: Function) -> str:
        queries, rows, written = results(function)
        if written != len(rows):
            return f"{written} rows of the pool were written, not {len(rows)}"
        for name, got, wanted in (("q", queries, wanted_q), ("the pool", rows, wanted_rows)):
            error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
            if not error <= _ROUNDED_TWICE:
                return f"{name}: relative error {error:.2e}, at most {_ROUNDED_TWICE:.0e}"
        return ""

    return problem


def landed(buffer: torch.Tensor, arguments: dict[str, Any]) -> str:
    """What is wrong with a pool [num_rows, 2 * heads, dim] that was zero before the call; empty where nothing is."""
    wanted = torch.cat((arguments["k"], arguments["v"]), 1)
    slots = arguments["slot_mapping"].long()
    wrong = int((buffer.index_select(0, slots) != wanted).flatten(1).any(1).sum())
    if wrong:
        return f"{wrong} of {len(slots)} rows do not hold their token"
    filled = int((wanted != 0).flatten(1).any(1).sum())
    others = rows_with_content(buffer) - filled
    return f"{others} rows were written that no slot names" if others else ""


def rows_with_content(buffer: torch.Tensor) -> int:
    """Rows of a pool that hold anything but zeros."""
    return sum(int((part != 0).flatten(1).any(1).sum()) for part in buffer.split(_CHUNK))


def clear(buffer: torch.Tensor, slots: torch.Tensor) -> None:
    """Zeros in the rows of ``slots``, on the device."""
    buffer.index_fill_(0, slots.long(), 0)


def fragmented(work: Workload) -> Workload:
    """The same attention over pools of twice the pages, every second one another's and full of NaN.

    Page tables have rows of others between the batch's, whose order is shuffled; a key read from a wrong page shows as NaN.
    """
    return replace(work, variant="fragmented", sets=tuple(_fragmented(number, each) for number, each in enumerate(work.sets)))


def _fragmented(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
    page, heads, dim = arguments["page_size"], arguments["k_pool"].shape[1], arguments["k_pool"].shape[2]
    device = arguments["k_pool"].device
    generator = torch.Generator(device).manual_seed(_SEED + number)
    pages = combined(arguments["k_pool"], heads).view(-1, page, 2 * heads, dim)
    where = torch.randperm(2 * len(pages), generator=generator, device=device)[: len(pages)]
    larger = torch.full((2 * len(pages), *pages.shape[1:]), float("nan"), dtype=pages.dtype, device=device)
    larger[where] = pages
    pool = larger.view(-1, 2 * heads, dim)
    table = arguments["page_table"]
    rows = torch.randperm(2 * len(table), generator=generator, device=device)[: len(table)]
    unused = torch.ones(2 * len(pages), device=device).index_fill_(0, where, 0).argmax()
    wider = unused.to(torch.int32).expand(2 * len(table), table.shape[1]).clone()
    wider[rows] = where.to(torch.int32)[table.long()]
    return arguments | {
        "k_pool": pool[:, :heads],
        "v_pool": pool[:, heads:],
        "page_table": wider,
        "table_rows": rows.to(torch.int32),
    }
