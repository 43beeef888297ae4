"""Where does the Triton product keep up with cuBLAS, from one token (weights are read once) to a long prompt (arithmetic)?

    python -m benchmarks.kernels.bench_dense_gemm [--quick] [--peers FOLDER] [--compile]

The projections of an 8B Llama and of Qwen3 0.6B. cuBLAS is a row of ours (cublas.dense_gemm), so it needs no peer.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nn

from benchmarks.kernels.cells import Cell
from benchmarks.kernels.microbench import Bench, main
from rapid_llm.kernels.measure.serving import LAYERS
from rapid_llm.kernels.measure.workloads import Workload

TOKENS = (1, 8, 64, 512, 4096)
HEAD = (128_256, 4096)  # n, k of the product with the vocabulary


def _cells() -> list[Cell]:
    shapes = [*LAYERS["llama-8b"], HEAD, *LAYERS["qwen3-0.6b"]]
    return [Cell("dense_gemm", {"num_tokens": tokens, "n": n, "k": k}) for n, k in shapes for tokens in TOKENS]


def _inductor(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    """Inductor's own Triton product, its tiles searched at this very size."""
    import torch._inductor.config as inductor

    with inductor.patch(max_autotune_gemm=True, max_autotune_gemm_backends="TRITON"):
        torch._dynamo.reset()
        function = torch.compile(lambda x, weight: nn.linear(x, weight), dynamic=False)
        function(work.sets[0]["x"], work.sets[0]["weight"])
    return [lambda each=each: function(each["x"], each["weight"]) for each in work.sets]


BENCH = Bench("bench_dense_gemm", _cells(), compiled={"dense_gemm": {"inductor_triton_autotuned": _inductor}})

if __name__ == "__main__":
    main(__doc__, BENCH)
