"""Rows and contracts of the fused family."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, Family, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")
_NATIVE = CapabilityRequirement(device_types=("cuda",), min_sm=89, native_fp8=True, packages=("triton",), min_triton=(3, 6))
_ANY = CapabilityRequirement(device_types=("cuda", "cpu"))
_VIEWS = ("row_strided", "offset")
_OUT = TensorArg("out", ("num_tokens", "d"), dtype="float8_e4m3fn", written=True, views=_VIEWS)
_SCALES = TensorArg(
    "scales", ("num_tokens", "groups"), dtype="float32", written=True, views=("row_strided", "transposed", "offset")
)
_SWEEP = (
    {"num_tokens": 0, "d": 64, "group": 64},
    {"num_tokens": 1, "d": 4096, "group": 4096},
    {"num_tokens": 1, "d": 1000, "group": 128},
    {"num_tokens": 2, "d": 20_480, "group": 20_480},
    {"num_tokens": 2, "d": 20_480, "group": 128},
    {"num_tokens": 7, "d": 1025, "group": 1025},
    {"num_tokens": 33, "d": 384, "group": 128},
    {"num_tokens": 65, "d": 72, "group": 72},
)
_HARD = ("large_magnitude", "zero_rows", "not_finite")


def _written(sizes: Sizes) -> int:
    """Bytes of the numbers and of their scales."""
    return sizes["num_tokens"] * (sizes["d"] + 4 * -(-sizes["d"] // max(sizes["group"], 1)))


def _add_rms_norm_cost(sizes: Sizes, itemsize: int) -> Cost:
    rows = sizes["num_tokens"] * sizes["d"] * itemsize
    return Cost(read=2 * rows + sizes["d"] * itemsize, written=rows + _written(sizes))


def _swiglu_cost(sizes: Sizes, itemsize: int) -> Cost:
    return Cost(read=2 * sizes["num_tokens"] * sizes["d"] * itemsize, written=_written(sizes))


ADD_RMS_NORM_FP8 = Contract(
    op="add_rms_norm_fp8",
    summary="residual += x in place, then residual / rms(residual) * weight as e4m3 numbers and their scales, of each token or "
    "of each 128 of d (group = d says one a token)",
    phase="both",
    tensors=(
        TensorArg("x", ("num_tokens", "d"), views=_VIEWS),
        TensorArg("residual", ("num_tokens", "d"), written=True, views=_VIEWS),
        TensorArg("weight", ("d",), views=("offset",)),
        _OUT,
        _SCALES,
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 24, "d": 1 << 16, "group": 1 << 16},
    sweep=_SWEEP,
    defaults={"num_tokens": 1, "d": 4096, "group": 4096},
    cost=_add_rms_norm_cost,
    free="num_tokens",
    hard=_HARD,
)

SWIGLU_FP8 = Contract(
    op="swiglu_fp8",
    summary="silu(gate) * up over a fused gate-up row as e4m3 numbers and their scales, of each token or of each 128 of d "
    "(group = d says one a token)",
    phase="both",
    tensors=(TensorArg("gate_up", ("num_tokens", "2*d"), views=_VIEWS), _OUT, _SCALES),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "d": 1 << 17, "group": 1 << 17},
    sweep=_SWEEP,
    defaults={"num_tokens": 1, "d": 14336, "group": 14336},
    cost=_swiglu_cost,
    free="num_tokens",
    hard=_HARD,
)

FAMILY = Family(
    name="fused",
    contracts=(ADD_RMS_NORM_FP8, SWIGLU_FP8),
    rows=(
        KernelSpec(
            op="add_rms_norm_fp8",
            name="torch.add_rms_norm_fp8",
            target="rapid_llm.kernels.ops.fallback.fused:add_rms_norm_fp8",
            requires=_ANY,
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="add_rms_norm_fp8",
            name="triton.add_rms_norm_fp8",
            target="rapid_llm.kernels.ops.fused.add_rms_norm_fp8:add_rms_norm_fp8",
            requires=_NATIVE,
            dtypes=FLOATS,
            priority=10,
        ),
        KernelSpec(
            op="swiglu_fp8",
            name="torch.swiglu_fp8",
            target="rapid_llm.kernels.ops.fallback.fused:swiglu_fp8",
            requires=_ANY,
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="swiglu_fp8",
            name="triton.swiglu_fp8",
            target="rapid_llm.kernels.ops.fused.swiglu_fp8:swiglu_fp8",
            requires=_NATIVE,
            dtypes=FLOATS,
            priority=10,
        ),
    ),
)
