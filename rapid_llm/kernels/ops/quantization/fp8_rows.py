"""Rows and contracts of e4m3 activations and of products of e4m3 numbers."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, KernelSpec, Limit, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")
_NATIVE = CapabilityRequirement(device_types=("cuda",), min_sm=89, native_fp8=True, packages=("triton",), min_triton=(3, 6))
_ANY = CapabilityRequirement(device_types=("cuda", "cpu"))
_VIEWS = ("row_strided", "offset")


def _groups(sizes: Sizes) -> int:
    """Scales along k."""
    return -(-sizes["k"] // max(sizes["group"], 1))


def _quantize_cost(sizes: Sizes, itemsize: int) -> Cost:
    tokens, k = sizes["num_tokens"], sizes["k"]
    return Cost(read=tokens * k * itemsize, written=tokens * (k + 4 * _groups(sizes)))


def _gemm_cost(sizes: Sizes, itemsize: int) -> Cost:
    tokens, n, k = sizes["num_tokens"], sizes["n"], sizes["k"]
    outputs = n if _groups(sizes) == 1 else -(-n // 128)
    read = (tokens + n) * k + 4 * _groups(sizes) * (tokens + outputs) if tokens else 0
    return Cost(read=read, written=tokens * n * itemsize, flops=2 * tokens * n * k, operand_bytes=1)


QUANTIZE_FP8 = Contract(
    op="quantize_fp8",
    summary="x / scale rounded to e4m3, and the scales: largest magnitude / 448 of each token or of each 128 of k (group = k "
    "says one a token), or one that is given",
    phase="both",
    tensors=(
        TensorArg("x", ("num_tokens", "k"), views=_VIEWS),
        TensorArg("out", ("num_tokens", "k"), dtype="float8_e4m3fn", written=True, views=_VIEWS),
        TensorArg(
            "scales", ("num_tokens", "groups"), dtype="float32", written=True, views=("row_strided", "transposed", "offset")
        ),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 24, "k": 1 << 17, "group": 1 << 17},
    sweep=(
        {"num_tokens": 0, "k": 64, "group": 64},
        {"num_tokens": 1, "k": 4096, "group": 4096},
        {"num_tokens": 1, "k": 1000, "group": 128},
        {"num_tokens": 2, "k": 1536, "group": 1536},
        {"num_tokens": 3, "k": 20_480, "group": 20_480},
        {"num_tokens": 7, "k": 1025, "group": 1025},
        {"num_tokens": 65, "k": 384, "group": 128},
        {"num_tokens": 130, "k": 72, "group": 72},
    ),
    defaults={"num_tokens": 1, "k": 4096, "group": 4096},
    cost=_quantize_cost,
    free="num_tokens",
    hard=("large_magnitude", "zero_rows", "tiny", "not_finite"),
)

FP8_GEMM = Contract(
    op="fp8_gemm",
    summary="(x * x_scales) @ (weight * weight_scales).T (+ bias) of e4m3 numbers, accumulated in fp32; scales of tensors, "
    "tokens and outputs, or 128 of k (group = k says one along k)",
    phase="both",
    tensors=(
        TensorArg("x", ("num_tokens", "k"), dtype="float8_e4m3fn", views=_VIEWS),
        TensorArg("weight", ("n", "k"), dtype="float8_e4m3fn", views=_VIEWS),
        TensorArg("x_scales", ("num_tokens", "groups"), dtype="float32", views=("row_strided", "transposed", "offset")),
        TensorArg("weight_scales", ("n", "groups"), dtype="float32", views=("row_strided", "transposed", "offset")),
        TensorArg("out", ("num_tokens", "n"), written=True, views=_VIEWS),
        TensorArg("bias", ("n",), views=("offset",)),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "n": 1 << 19, "k": 1 << 17, "group": 1 << 17},
    sweep=(
        {"num_tokens": 0, "n": 64, "k": 192, "group": 192},
        {"num_tokens": 1, "n": 256, "k": 512, "group": 512},
        {"num_tokens": 1, "n": 257, "k": 384, "group": 128},
        {"num_tokens": 7, "n": 100, "k": 129, "group": 129},
        {"num_tokens": 16, "n": 66, "k": 288, "group": 128},
        {"num_tokens": 33, "n": 304, "k": 256, "group": 256},
        {"num_tokens": 65, "n": 65, "k": 96, "group": 96},
        {"num_tokens": 66, "n": 176, "k": 208, "group": 208},
        {"num_tokens": 130, "n": 300, "k": 256, "group": 128},
    ),
    defaults={"num_tokens": 1, "n": 4096, "k": 4096, "group": 4096},
    cost=_gemm_cost,
    free="num_tokens",
    hard=("large_magnitude", "far_scales", "every_code"),
)

CONTRACTS = (QUANTIZE_FP8, FP8_GEMM)

_FALLBACK = "rapid_llm.kernels.ops.fallback.quantization.fp8"
_TRITON = "rapid_llm.kernels.ops.quantization.fp8"
ROWS = (
    KernelSpec(
        op="quantize_fp8",
        name="torch.quantize_fp8",
        target=f"{_FALLBACK}:quantize_fp8",
        requires=_ANY,
        dtypes=FLOATS,
        fallback=True,
    ),
    KernelSpec(
        op="quantize_fp8",
        name="triton.quantize_fp8",
        target=f"{_TRITON}:quantize_fp8",
        requires=_NATIVE,
        dtypes=FLOATS,
        priority=10,
    ),
    KernelSpec(
        op="fp8_gemm",
        name="torch.fp8_gemm",
        target=f"{_FALLBACK}:fp8_gemm",
        requires=_ANY,
        dtypes=FLOATS,
        fallback=True,
        library=True,
    ),
    KernelSpec(
        op="fp8_gemm",
        name="cublas.fp8_gemm",
        target="rapid_llm.kernels.ops.quantization.fp8_library:fp8_gemm",
        requires=CapabilityRequirement(device_types=("cuda",), min_sm=89, native_fp8=True),
        dtypes=("bfloat16",),
        limits={"n": Limit(low=16, multiple=16), "k": Limit(low=144, multiple=16), "group": Limit(low=129)},  # one scale along k
        priority=20,
        library=True,
    ),
    KernelSpec(
        op="fp8_gemm",
        name="triton.fp8_gemm",
        target=f"{_TRITON}:fp8_gemm",
        requires=_NATIVE,
        dtypes=FLOATS,
        priority=10,
    ),
)
