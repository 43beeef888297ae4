"""Rows and contracts of 4-bit floating-point weights: their products and their quantiser."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, KernelSpec, Limit, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")
NVFP4_GROUP, MXFP4_GROUP = 16, 32  # elements along k that share a scale
_TRITON = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))
_ANY = CapabilityRequirement(device_types=("cuda", "cpu"))


def _product_cost(sizes: Sizes, itemsize: int, group: int, row_bytes: int) -> Cost:
    """Of a product whose outputs have a byte for each ``group`` of k and ``row_bytes`` more."""
    tokens, n, k = sizes["num_tokens"], sizes["n"], sizes["k"]
    read = tokens * k * itemsize + n * (k // 2 + k // group + row_bytes) if tokens else 0
    return Cost(read=read, written=tokens * n * itemsize, flops=2 * tokens * n * k)


def _nvfp4_cost(sizes: Sizes, itemsize: int) -> Cost:
    return _product_cost(sizes, itemsize, NVFP4_GROUP, 4)


def _mxfp4_cost(sizes: Sizes, itemsize: int) -> Cost:
    return _product_cost(sizes, itemsize, MXFP4_GROUP, 0)


def _quantiser_cost(sizes: Sizes, itemsize: int) -> Cost:
    elements = sizes["num_tokens"] * sizes["k"]
    return Cost(read=elements * itemsize, written=elements // 2 + elements // NVFP4_GROUP)


_X = TensorArg("x", ("num_tokens", "k"), views=("row_strided", "offset"))
_WEIGHT = TensorArg("weight", ("n", "half_k"), dtype="uint8", views=("row_strided",))
_OUT = TensorArg("out", ("num_tokens", "n"), written=True, views=("row_strided", "offset"))
_BIAS = TensorArg("bias", ("n",), views=("offset",))
_MAXIMA = {"num_tokens": 1 << 20, "n": 1 << 19, "k": 1 << 17}
_DEFAULTS = {"num_tokens": 1, "n": 4096, "k": 4096}
_HARD = ("large_magnitude", "far_scales", "every_code")

NVFP4_GEMM = Contract(
    op="nvfp4_gemm",
    summary="x @ (e2m1 * e4m3 * fp32).T (+ bias): 4-bit floats, two a byte, with an e4m3 scale for each 16 along k and an fp32 "
    "one for each output, accumulated in fp32",
    phase="both",
    tensors=(
        _X,
        _WEIGHT,
        TensorArg("scales", ("n", "groups_of_16"), dtype="float8_e4m3fn", views=("row_strided", "offset")),
        TensorArg("global_scales", ("n",), dtype="float32", views=("offset",)),
        _OUT,
        _BIAS,
    ),
    dtypes=FLOATS,
    maxima=_MAXIMA,
    sweep=(
        {"num_tokens": 0, "n": 64, "k": 64},
        {"num_tokens": 1, "n": 257, "k": 256},
        {"num_tokens": 1, "n": 48, "k": 768},
        {"num_tokens": 2, "n": 33, "k": 1040},
        {"num_tokens": 7, "n": 100, "k": 144},
        {"num_tokens": 16, "n": 66, "k": 288},
        {"num_tokens": 65, "n": 65, "k": 96},
        {"num_tokens": 130, "n": 72, "k": 192},
    ),
    defaults=_DEFAULTS,
    cost=_nvfp4_cost,
    free="num_tokens",
    hard=_HARD,
)

MXFP4_GEMM = Contract(
    op="mxfp4_gemm",
    summary="x @ (e2m1 * e8m0).T (+ bias): 4-bit floats, two a byte, with a power of two for each 32 along k, accumulated in "
    "fp32",
    phase="both",
    tensors=(
        _X,
        _WEIGHT,
        TensorArg("scales", ("n", "groups_of_32"), dtype="uint8", views=("row_strided", "offset")),
        _OUT,
        _BIAS,
    ),
    dtypes=FLOATS,
    maxima=_MAXIMA,
    sweep=(
        {"num_tokens": 0, "n": 64, "k": 64},
        {"num_tokens": 1, "n": 257, "k": 256},
        {"num_tokens": 1, "n": 48, "k": 768},
        {"num_tokens": 2, "n": 33, "k": 1056},
        {"num_tokens": 7, "n": 100, "k": 160},
        {"num_tokens": 16, "n": 66, "k": 288},
        {"num_tokens": 65, "n": 65, "k": 96},
        {"num_tokens": 130, "n": 72, "k": 192},
    ),
    defaults=_DEFAULTS,
    cost=_mxfp4_cost,
    free="num_tokens",
    hard=_HARD,
)

QUANTIZE_NVFP4 = Contract(
    op="quantize_nvfp4",
    summary="x as 4-bit floats, two a byte, with an e4m3 scale for each 16 along k: value = e2m1 * scale * global scale",
    phase="both",
    tensors=(
        _X,
        TensorArg("global_scale", ("1",), dtype="float32"),
        TensorArg("out", ("num_tokens", "half_k"), dtype="uint8", written=True, views=("row_strided", "offset")),
        TensorArg("scales", ("num_tokens", "groups_of_16"), dtype="float8_e4m3fn", written=True, views=("row_strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "k": 1 << 17},
    sweep=(
        {"num_tokens": 0, "k": 64},
        {"num_tokens": 1, "k": 16},
        {"num_tokens": 1, "k": 4096},
        {"num_tokens": 7, "k": 1008},
        {"num_tokens": 3, "k": 2064},
        {"num_tokens": 65, "k": 96},
    ),
    defaults={"num_tokens": 1, "k": 4096},
    cost=_quantiser_cost,
    free="num_tokens",
    hard=("large_magnitude", "zero_groups", "tiny", "not_finite", "ties"),
)

CONTRACTS = (NVFP4_GEMM, MXFP4_GEMM, QUANTIZE_NVFP4)


def _rows(op: str, module: str, group: int) -> tuple[KernelSpec, KernelSpec]:
    """The plain-torch row of ``op``, and the Triton one, which is in ``module``."""
    limits = {"k": Limit(low=group, multiple=group)}
    return (
        KernelSpec(
            op=op,
            name=f"torch.{op}",
            target=f"rapid_llm.kernels.ops.fallback.quantization.fp4:{op}",
            requires=_ANY,
            dtypes=FLOATS,
            limits=limits,
            fallback=True,
            library=op != "quantize_nvfp4",
        ),
        KernelSpec(
            op=op,
            name=f"triton.{op}",
            target=f"rapid_llm.kernels.ops.quantization.{module}:{op}",
            requires=_TRITON,
            dtypes=FLOATS,
            limits=limits,
            priority=10,
        ),
    )


ROWS = (
    *_rows("nvfp4_gemm", "nvfp4", NVFP4_GROUP),
    *_rows("mxfp4_gemm", "mxfp4", MXFP4_GROUP),
    *_rows("quantize_nvfp4", "nvfp4", NVFP4_GROUP),
)
