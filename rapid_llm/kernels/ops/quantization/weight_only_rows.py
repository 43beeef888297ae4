"""Rows and contracts of products with weights that alone are quantised."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")
_TRITON = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))
_ANY = CapabilityRequirement(device_types=("cuda", "cpu"))


def _product_cost(sizes: Sizes, itemsize: int, weight_bytes: int, group_bytes: int) -> Cost:
    """Of a product whose weight takes ``weight_bytes`` in all, and ``group_bytes`` more for each group of each output."""
    tokens, n, k = sizes["num_tokens"], sizes["n"], sizes["k"]
    groups = max(k // sizes["group"], 1)
    read = tokens * k * itemsize + weight_bytes + n * groups * group_bytes if tokens else 0
    return Cost(read=read, written=tokens * n * itemsize, flops=2 * tokens * n * k)


def _w8a16_cost(sizes: Sizes, itemsize: int) -> Cost:
    return _product_cost(sizes, itemsize, sizes["n"] * sizes["k"], 4)


def _w4a16_cost(sizes: Sizes, itemsize: int) -> Cost:
    return _product_cost(sizes, itemsize, sizes["n"] * (sizes["k"] // 2), itemsize)


_X = TensorArg("x", ("num_tokens", "k"), views=("row_strided", "offset"))
_OUT = TensorArg("out", ("num_tokens", "n"), written=True, views=("row_strided", "offset"))
_BIAS = TensorArg("bias", ("n",), views=("offset",))
_MAXIMA = {"num_tokens": 1 << 20, "n": 1 << 19, "k": 1 << 17, "group": 1 << 17}
_HARD = ("large_magnitude", "far_scales", "every_code")

W8A16_GEMM = Contract(
    op="w8a16_gemm",
    summary="x @ (weight * scales).T (+ bias) of int8 or e4m3 weights, accumulated in fp32; a scale for each output, or for "
    "each group along k (group = k says one an output)",
    phase="both",
    tensors=(
        _X,
        TensorArg("weight", ("n", "k"), dtype="int8", views=("row_strided", "offset")),
        TensorArg("scales", ("n", "groups"), dtype="float32", views=("row_strided", "offset")),
        _OUT,
        _BIAS,
    ),
    dtypes=FLOATS,
    maxima=_MAXIMA,
    sweep=(
        {"num_tokens": 0, "n": 64, "k": 64, "group": 16},
        {"num_tokens": 1, "n": 257, "k": 256, "group": 256},
        {"num_tokens": 1, "n": 48, "k": 768, "group": 128},
        {"num_tokens": 2, "n": 48, "k": 1024, "group": 512},
        {"num_tokens": 7, "n": 100, "k": 129, "group": 129},
        {"num_tokens": 16, "n": 66, "k": 288, "group": 32},
        {"num_tokens": 65, "n": 65, "k": 96, "group": 16},
        {"num_tokens": 130, "n": 72, "k": 192, "group": 64},
    ),
    defaults={"num_tokens": 1, "n": 4096, "k": 4096, "group": 4096},
    cost=_w8a16_cost,
    free="num_tokens",
    hard=_HARD,
)

W4A16_GEMM = Contract(
    op="w4a16_gemm",
    summary="x @ ((codes - zeros) * scales).T (+ bias) of 4-bit codes, two a byte, accumulated in fp32; a scale and a zero "
    "point, a code or any number, for each group along k (group = k says one an output)",
    phase="both",
    tensors=(
        _X,
        TensorArg("weight", ("n", "half_k"), dtype="uint8", views=("row_strided", "offset")),
        TensorArg("scales", ("n", "groups"), views=("row_strided", "offset")),
        _OUT,
        TensorArg("zeros", ("n", "groups"), dtype="uint8", views=("row_strided", "offset")),
        _BIAS,
    ),
    dtypes=FLOATS,
    maxima=_MAXIMA,
    sweep=(
        {"num_tokens": 0, "n": 64, "k": 64, "group": 16},
        {"num_tokens": 1, "n": 257, "k": 256, "group": 256},
        {"num_tokens": 1, "n": 48, "k": 768, "group": 128},
        {"num_tokens": 2, "n": 48, "k": 1024, "group": 512},
        {"num_tokens": 5, "n": 36, "k": 1024, "group": 512},
        {"num_tokens": 7, "n": 100, "k": 130, "group": 130},
        {"num_tokens": 16, "n": 66, "k": 288, "group": 32},
        {"num_tokens": 33, "n": 40, "k": 160, "group": 32},
        {"num_tokens": 65, "n": 65, "k": 96, "group": 16},
        {"num_tokens": 130, "n": 72, "k": 192, "group": 64},
    ),
    defaults={"num_tokens": 1, "n": 4096, "k": 4096, "group": 128},
    cost=_w4a16_cost,
    free="num_tokens",
    hard=_HARD,
)

CONTRACTS = (W8A16_GEMM, W4A16_GEMM)

ROWS = (
    KernelSpec(
        op="w8a16_gemm",
        name="torch.w8a16_gemm",
        target="rapid_llm.kernels.ops.fallback.quantization.weight_only:w8a16_gemm",
        requires=_ANY,
        dtypes=FLOATS,
        fallback=True,
        library=True,
    ),
    KernelSpec(
        op="w8a16_gemm",
        name="triton.w8a16_gemm",
        target="rapid_llm.kernels.ops.quantization.w8a16:w8a16_gemm",
        requires=_TRITON,
        dtypes=FLOATS,
        priority=10,
    ),
    KernelSpec(
        op="w4a16_gemm",
        name="torch.w4a16_gemm",
        target="rapid_llm.kernels.ops.fallback.quantization.weight_only:w4a16_gemm",
        requires=_ANY,
        dtypes=FLOATS,
        fallback=True,
        library=True,
    ),
    KernelSpec(
        op="w4a16_gemm",
        name="triton.w4a16_gemm",
        target="rapid_llm.kernels.ops.quantization.w4a16:w4a16_gemm",
        requires=_TRITON,
        dtypes=FLOATS,
        priority=10,
    ),
)
