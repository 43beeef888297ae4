"""Makes peers_recorded.json of the JSON files of a run of the peers: python -m benchmarks.kernels.import_recorded FOLDER."""

import json
import sys
from pathlib import Path

from benchmarks.kernels.peers import RECORDED, our_cell
from rapid_llm.kernels.measure.ceilings import Ceilings

ORIGIN = (
    "Measured 2026-11-29 on one NVIDIA H200 with torch 2.11.0, Triton 3.6.0, CUDA 13.0, vLLM 0.26.0, FlashInfer 0.6.14, "
    "liger-kernel 0.8.5 and flag-gems 5.0.2: graph replay over rotating inputs, each result checked before it was timed. "
    "The fastest arm of each case. Floors are ours: the contract's bytes and operations at that run's ceilings."
)


def main() -> None:
    """The fastest right arm of every case that is a cell of ours."""
    best: dict[str, tuple] = {}
    for name in ("elementwise", "kv_sampling", "gemm", "decode", "prefill", "moe"):
        run = json.loads((Path(sys.argv[1]) / f"{name}.json").read_text())
        c = run["ceilings"]
        ceilings = Ceilings(c["read_gbps"], c["copy_gbps"], c["bf16_tflops"], c["graph_node_us"])
        for row in run["rows"]:
            cell = our_cell(row["op"], row["case"])
            if cell and row.get("ok") and ("us" in row) and row["us"] < best.get(str(cell), (None, row["us"] + 1))[1]:
                best[str(cell)] = (cell, row["us"], row["impl"], ceilings.floor_us(cell.cost, cell.itemsize))
    lines = [
        json.dumps({"op": cell.op, "sizes": cell.sizes, "dtype": cell.dtype, "variant": cell.variant, "arm": arm,
                    "us": round(us, 3), "floor_us": float(f"{floor:.5g}")})
        for cell, us, arm, floor in best.values()
    ]  # fmt: skip
    head = json.dumps({"origin": ORIGIN, "ceilings": vars(ceilings)}, indent=1).removesuffix("\n}")
    RECORDED.write_text(head + ',\n "cells": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


if __name__ == "__main__":
    main()
