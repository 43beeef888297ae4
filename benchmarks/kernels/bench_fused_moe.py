"""Experts of Qwen3 30B-A3B, from one token (the weights of eight are read) to a long prompt (arithmetic), format by format.

    python -m benchmarks.kernels.bench_fused_moe [--quick] [--peers FOLDER]

Both sides begin with the experts chosen: tokens are brought together by expert within the time, the router is not. In the
recorded times of peers it is, and is under a hundredth of them.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.kernels.cells import Cell, Skipped
from benchmarks.kernels.microbench import Bench, main
from benchmarks.kernels.peers import QWEN3_EXPERTS
from rapid_llm.kernels.measure.workloads import Workload

TOKENS = (1, 8, 16, 32, 64, 512, 4096, 16_384)
FORMATS = {
    "fused_moe": (None,),
    "fused_moe_fp8": (0, 128),
    "fused_moe_w8a16": (0,),
    "fused_moe_w4a16": (128,),
    "fused_moe_mxfp4": (None,),
}
"""Elements along k that share a scale; 0 is a whole row, None a size that the op does not have."""


def _cells() -> list[Cell]:
    cells = []
    for op, groups in FORMATS.items():
        for group in groups:
            for tokens in TOKENS:
                sizes = {"num_tokens": tokens, **QWEN3_EXPERTS}
                cells.append(Cell(op, sizes if group is None else sizes | {"group": group}))
    return cells


def _vllm(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    """vLLM's Triton experts, tiles from its own table for this card."""
    try:
        from vllm.model_executor.layers.fused_moe import fused_moe
        from vllm.platforms import current_platform
    except ImportError as error:
        raise Skipped(f"vllm is not installed ({error})") from None
    current_platform.import_kernels()
    return [
        lambda s=s: fused_moe.fused_experts(s["x"], s["gate_up"], s["down"], s["weights"], s["ids"])  # type: ignore[misc]
        for s in work.sets
    ]


def _cublas_per_expert(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    """torch's grouped product, tokens brought together by a sort."""
    import torch

    experts, top_k = cell.sizes["num_experts"], cell.sizes["top_k"]

    def run(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any, **_: Any) -> Any:
        flat = ids.reshape(-1).long()
        order = flat.argsort(stable=True)
        ends = torch.searchsorted(flat[order], torch.arange(experts, device=x.device), right=True).to(torch.int32)
        gate, up = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends).chunk(2, 1)
        results = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
        results *= weights.reshape(-1)[order, None].to(x.dtype)
        placed = torch.empty_like(results)
        placed[order] = results
        return placed.view(len(x), top_k, -1).sum(1)

    return [lambda s=s: run(**s) for s in work.sets]  # type: ignore[misc]


BENCH = Bench(
    "bench_fused_moe", _cells(), peers={"fused_moe": {"vllm_triton_fused_experts": _vllm, "torch_grouped_mm": _cublas_per_expert}}
)

if __name__ == "__main__":
    main(__doc__, BENCH)
