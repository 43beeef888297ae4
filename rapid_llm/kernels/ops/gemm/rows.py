"""Row and contract of the gemm family."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, Family, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")


def _dense_gemm_cost(sizes: Sizes, itemsize: int) -> Cost:
    tokens, n, k = sizes["num_tokens"], sizes["n"], sizes["k"]
    return Cost(read=(tokens + n) * k * itemsize if tokens else 0, written=tokens * n * itemsize, flops=2 * tokens * n * k)


DENSE_GEMM = Contract(
    op="dense_gemm",
    summary="x @ weight.T (+ bias), accumulated in fp32; the weight may be stored as [n, k] or as [k, n]",
    phase="both",
    tensors=(
        TensorArg("x", ("num_tokens", "k"), views=("row_strided", "offset")),
        TensorArg("weight", ("n", "k"), views=("row_strided", "transposed", "offset")),
        TensorArg("out", ("num_tokens", "n"), written=True, views=("row_strided", "offset")),
        TensorArg("bias", ("n",), views=("offset",)),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "n": 1 << 19, "k": 1 << 17},
    sweep=(
        {"num_tokens": 0, "n": 64, "k": 64},
        {"num_tokens": 1, "n": 576, "k": 576},
        {"num_tokens": 1, "n": 1953, "k": 3960},
        {"num_tokens": 2, "n": 257, "k": 64},
        {"num_tokens": 7, "n": 1000, "k": 512},
        {"num_tokens": 65, "n": 513, "k": 257},
        {"num_tokens": 16, "n": 128, "k": 1025},
        {"num_tokens": 130, "n": 1536, "k": 576},
    ),
    defaults={"num_tokens": 1, "n": 4096, "k": 4096},
    cost=_dense_gemm_cost,
    free="num_tokens",
    hard=("large_magnitude",),
)

FAMILY = Family(
    name="gemm",
    contracts=(DENSE_GEMM,),
    rows=(
        KernelSpec(
            op="dense_gemm",
            name="torch.dense_gemm",
            target="rapid_llm.kernels.ops.fallback.gemm:dense_gemm",
            prepare="prepare_dense_gemm",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
            library=True,
        ),
        KernelSpec(
            op="dense_gemm",
            name="cublas.dense_gemm",
            target="rapid_llm.kernels.ops.gemm.library_gemm:dense_gemm",
            requires=CapabilityRequirement(device_types=("cuda",)),
            # Not float16: with a bias cuBLAS rounds partial sums to it, whatever torch is told.
            dtypes=("float32", "bfloat16"),
            priority=20,
            library=True,
        ),
        KernelSpec(
            op="dense_gemm",
            name="triton.dense_gemm",
            target="rapid_llm.kernels.ops.gemm.dense_gemm:dense_gemm",
            requires=CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6)),
            dtypes=FLOATS,
            priority=10,
        ),
    ),
)
