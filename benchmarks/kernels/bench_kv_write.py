"""What does a step pay to put its K and V into the pool, one token a sequence (decode) or whole prompts (prefill)?

    python -m benchmarks.kernels.bench_kv_write [--quick] [--op OP] [--peers FOLDER]

Slots are scattered (decode: a row of its own for each token), in shuffled pages of 16 (prefill), and past 2^31 elements of the
pool, where a 32-bit offset would wrap. Every arm's rows are read back, and all others must be untouched (``kv_pool``).
update_kv_index, the few page ids of a step, stands beside it, and so does the write to a pool of e4m3, checked by plain torch's.
What norms and rotates on the way is measured against the same in launches of their own.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels import kv_pool
from benchmarks.kernels.cells import Cell
from benchmarks.kernels.microbench import Bench, Check, build, by_fallback, main
from benchmarks.kernels.peers import combined
from rapid_llm.kernels.device import current_device
from rapid_llm.kernels.dispatcher.dispatch import dispatch
from rapid_llm.kernels.measure.workloads import Workload

TOKENS = (1, 8, 64, 512, 4096, 16_384)
ROWS, SERVED_ROWS = 1 << 16, 1 << 20
_FUSED = ("rope_kv_write", "qk_norm_rope_kv_write")
LARGE_ROWS = 5 << 18  # of 8 heads of 128: 2.7e9 elements, 5.4 GB in bf16


def _cells() -> list[Cell]:
    cells = []
    for kv_heads, dim in ((8, 128), (4, 128), (3, 64)):
        shape = {"num_kv_heads": kv_heads, "head_dim": dim, "num_rows": ROWS}
        cells += [Cell("update_kv_buffer", {"num_tokens": n, **shape}, variant=kv_pool.SCATTERED) for n in TOKENS]
    shape = {"num_kv_heads": 8, "head_dim": 128}
    for tokens in (64, 512, 4096, 16_384):
        cells.append(Cell("update_kv_buffer", {"num_tokens": tokens, **shape, "num_rows": SERVED_ROWS}, variant=kv_pool.PAGES))
    for tokens in (1, 64, 4096):
        cells.append(
            Cell("update_kv_buffer", {"num_tokens": tokens, **shape, "num_rows": LARGE_ROWS}, variant=kv_pool.PAST_INT32)
        )
    shape = {"num_kv_heads": 8, "head_dim": 128, "num_rows": SERVED_ROWS}
    cells += [Cell("update_kv_buffer_fp8", {"num_tokens": n, **shape}) for n in TOKENS]
    for op, heads in (("qk_norm_rope_kv_write", 16), ("rope_kv_write", 32)):
        shape = {"num_heads": heads, "num_kv_heads": 8, "head_dim": 128, "num_rows": ROWS}
        cells += [Cell(op, {"num_tokens": n, **shape}) for n in TOKENS]
    table = {"num_table_rows": 256, "num_columns": 8192}
    cells += [Cell("update_kv_index", {"num_updates": updates, **table}) for updates in (1, 8, 64, 256)]
    return cells


def _build(cell: Cell, device: str) -> Workload:
    return kv_pool.scatter_workload(cell, device) if cell.op == "update_kv_buffer" else build(cell, device)


def _gate(cell: Cell, work: Workload) -> Check:
    if cell.op in _FUSED:
        return kv_pool.rotated_gate(cell, work)
    return kv_pool.gate(cell, work) if cell.op == "update_kv_buffer" else by_fallback(cell, work)


def _apart(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    """This package's own kernels, one after another."""
    sizes = {name: cell.sizes[name] for name in ("num_heads", "num_kv_heads", "head_dim")}
    place: dict[str, Any] = {"device": current_device(), "dtype": cell.dtype}
    norm = dispatch("rms_norm", d=sizes["head_dim"], **place)
    rope = dispatch("rope", rotary_dim=sizes["head_dim"], **sizes, **place)
    write = dispatch("update_kv_buffer", **place)

    def call(each: dict[str, Any]) -> None:
        if "q_weight" in each:
            norm(each["q"], each["q_weight"], out=each["q"], eps=each["eps"])
            norm(each["k"], each["k_weight"], out=each["k"], eps=each["eps"])
        rope(each["q"], each["k"], each["positions"], each["cos_sin"])
        write(each["k"], each["v"], each["slot_mapping"], k_pool=each["k_pool"], v_pool=each["v_pool"])

    return [lambda each=each: call(each) for each in work.sets]


def _index_put(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    slots = [each["slot_mapping"].long() for each in work.sets]

    def write(each: dict[str, Any], rows: torch.Tensor) -> None:
        each["k_pool"][rows] = each["k"]
        each["v_pool"][rows] = each["v"]

    return [lambda each=each, rows=rows: write(each, rows) for each, rows in zip(work.sets, slots, strict=True)]


def _index_copy(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    heads = cell.sizes["num_kv_heads"]
    slots = [each["slot_mapping"].long() for each in work.sets]

    def write(each: dict[str, Any], rows: torch.Tensor) -> None:
        combined(each["k_pool"], heads).index_copy_(0, rows, torch.cat((each["k"], each["v"]), 1))

    return [lambda each=each, rows=rows: write(each, rows) for each, rows in zip(work.sets, slots, strict=True)]


def _table_put(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    places = [(each["table_rows"].long(), each["columns"].long()) for each in work.sets]
    return [
        lambda each=each, place=place: each["page_table"].index_put_(place, each["pages"])
        for each, place in zip(work.sets, places, strict=True)
    ]


BENCH = Bench(
    name="bench_kv_write",
    cells=_cells(),
    peers={
        "update_kv_buffer": {"torch_index_put": _index_put, "torch_index_copy_cat": _index_copy},
        "update_kv_index": {"torch_index_put": _table_put},
        **{op: {"launches_of_their_own": _apart} for op in _FUSED},
    },
    build=_build,
    gate=_gate,
)

if __name__ == "__main__":
    main(__doc__, BENCH)
