"""Rows and contracts of int8 activations and of products of int8 numbers."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")
_SM80 = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))
_ANY = CapabilityRequirement(device_types=("cuda", "cpu"))
_VIEWS = ("row_strided", "offset")


def _quantize_cost(sizes: Sizes, itemsize: int) -> Cost:
    tokens, k = sizes["num_tokens"], sizes["k"]
    return Cost(read=tokens * k * itemsize, written=tokens * (k + 4))


def _gemm_cost(sizes: Sizes, itemsize: int) -> Cost:
    tokens, n, k = sizes["num_tokens"], sizes["n"], sizes["k"]
    read = (tokens + n) * (k + 4) if tokens else 0
    return Cost(read=read, written=tokens * n * itemsize, flops=2 * tokens * n * k, operand_bytes=1)


QUANTIZE_INT8 = Contract(
    op="quantize_int8",
    summary="x / scale rounded to -127..127, and the scales: a token's largest magnitude / 127, or one that is given",
    phase="both",
    tensors=(
        TensorArg("x", ("num_tokens", "k"), views=_VIEWS),
        TensorArg("out", ("num_tokens", "k"), dtype="int8", written=True, views=_VIEWS),
        TensorArg("scales", ("num_tokens", "1"), dtype="float32", written=True, views=("row_strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 24, "k": 1 << 16},
    sweep=(
        {"num_tokens": 0, "k": 64},
        {"num_tokens": 1, "k": 4096},
        {"num_tokens": 2, "k": 1536},
        {"num_tokens": 3, "k": 20_480},
        {"num_tokens": 7, "k": 1025},
        {"num_tokens": 65, "k": 384},
        {"num_tokens": 130, "k": 72},
    ),
    defaults={"num_tokens": 1, "k": 4096},
    cost=_quantize_cost,
    free="num_tokens",
    hard=("large_magnitude", "zero_rows", "tiny", "not_finite"),
)

INT8_GEMM = Contract(
    op="int8_gemm",
    summary="(x @ weight.T) * x_scales * weight_scales (+ bias) of int8 numbers, summed exactly in int32; a scale for each token "
    "or one for all, and one for each output",
    phase="both",
    tensors=(
        TensorArg("x", ("num_tokens", "k"), dtype="int8", views=_VIEWS),
        TensorArg("weight", ("n", "k"), dtype="int8", views=_VIEWS),
        TensorArg("x_scales", ("num_tokens", "1"), dtype="float32", views=("row_strided", "offset")),
        TensorArg("weight_scales", ("n", "1"), dtype="float32", views=("row_strided", "offset")),
        TensorArg("out", ("num_tokens", "n"), written=True, views=_VIEWS),
        TensorArg("bias", ("n",), views=("offset",)),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "n": 1 << 19, "k": 1 << 16},
    sweep=(
        {"num_tokens": 0, "n": 64, "k": 64},
        {"num_tokens": 1, "n": 256, "k": 512},
        {"num_tokens": 1, "n": 257, "k": 1536},
        {"num_tokens": 7, "n": 100, "k": 129},
        {"num_tokens": 16, "n": 66, "k": 288},
        {"num_tokens": 65, "n": 65, "k": 96},
        {"num_tokens": 130, "n": 300, "k": 256},
    ),
    defaults={"num_tokens": 1, "n": 4096, "k": 4096},
    cost=_gemm_cost,
    free="num_tokens",
    hard=("large_magnitude", "far_scales"),
)

CONTRACTS = (QUANTIZE_INT8, INT8_GEMM)

_FALLBACK = "rapid_llm.kernels.ops.fallback.quantization.w8a8_int8"
_TRITON = "rapid_llm.kernels.ops.quantization.w8a8_int8"
ROWS = (
    KernelSpec(
        op="quantize_int8",
        name="torch.quantize_int8",
        target=f"{_FALLBACK}:quantize_int8",
        requires=_ANY,
        dtypes=FLOATS,
        fallback=True,
    ),
    KernelSpec(
        op="quantize_int8",
        name="triton.quantize_int8",
        target=f"{_TRITON}:quantize_int8",
        requires=_SM80,
        dtypes=FLOATS,
        priority=10,
    ),
    KernelSpec(
        op="int8_gemm",
        name="torch.int8_gemm",
        target=f"{_FALLBACK}:int8_gemm",
        requires=_ANY,
        dtypes=FLOATS,
        fallback=True,
        library=True,
    ),
    KernelSpec(
        op="int8_gemm",
        name="triton.int8_gemm",
        target=f"{_TRITON}:int8_gemm",
        requires=_SM80,
        dtypes=FLOATS,
        priority=10,
    ),
)
