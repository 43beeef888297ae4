"""What do weights in fewer bits buy where a product is bound by the bytes of its weight, and what do they cost above?

    python -m benchmarks.kernels.bench_quant_gemm [--quick] [--peers FOLDER]

The projections of an 8B Llama, one token by itself first. Quantisers of activations are cells of their own: fp8_gemm and
int8_gemm begin with quantised activations. dense_gemm stands in bench_dense_gemm at the same sizes.
"""

from benchmarks.kernels.cells import Cell
from benchmarks.kernels.microbench import Bench, main
from rapid_llm.kernels.measure.serving import LAYERS

TOKENS = (1, 8, 16, 32, 64, 512, 4096)
GROUPS = {"w8a16_gemm": (0,), "w4a16_gemm": (128,), "fp8_gemm": (0, 128)}
"""Elements of k that share a scale; 0 is all of them."""


def _cells() -> list[Cell]:
    cells = []
    for tokens in TOKENS:
        for n, k in LAYERS["llama-8b"]:
            sizes = {"num_tokens": tokens, "n": n, "k": k}
            cells += [Cell(op, sizes | {"group": group or k}) for op, groups in GROUPS.items() for group in groups]
            cells += [Cell(op, sizes) for op in ("int8_gemm", "nvfp4_gemm", "mxfp4_gemm")]
    for tokens in TOKENS:
        cells += [Cell("quantize_fp8", {"num_tokens": tokens, "k": 4096, "group": group}) for group in (4096, 128)]
        cells.append(Cell("quantize_int8", {"num_tokens": tokens, "k": 4096}))
    return cells


BENCH = Bench("bench_quant_gemm", _cells())

if __name__ == "__main__":
    main(__doc__, BENCH)
