"""Every kernel bench in one process, after one measurement of the card's ceilings.

python -m benchmarks.kernels.all [--quick] [--limit SECONDS] [--peers FOLDER]
"""

from benchmarks.kernels import (
    bench_attention,
    bench_dense_gemm,
    bench_elementwise,
    bench_fused_moe,
    bench_kv_write,
    bench_quant_gemm,
    bench_sampling,
)
from benchmarks.kernels.microbench import main

MODULES = (
    bench_elementwise,
    bench_kv_write,
    bench_sampling,
    bench_dense_gemm,
    bench_quant_gemm,
    bench_fused_moe,
    bench_attention,
)
BENCHES = [module.BENCH for module in MODULES]

if __name__ == "__main__":
    main(__doc__, *BENCHES)
