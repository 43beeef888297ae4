"""Rows and contracts of the norm family."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, Family, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")

_MAXIMA = {"num_tokens": 1 << 24, "d": 1 << 16}
_SWEEP = (
    {"num_tokens": 0, "d": 64},
    {"num_tokens": 1, "d": 576},
    {"num_tokens": 1, "d": 4096},
    {"num_tokens": 12, "d": 128},
    {"num_tokens": 21, "d": 64},
    {"num_tokens": 7, "d": 1000},
    {"num_tokens": 3, "d": 1025},
    {"num_tokens": 130, "d": 1536},
)


def _rms_norm_cost(sizes: Sizes, itemsize: int) -> Cost:
    rows = sizes["num_tokens"] * sizes["d"] * itemsize
    return Cost(read=rows + sizes["d"] * itemsize, written=rows)


def _add_rms_norm_cost(sizes: Sizes, itemsize: int) -> Cost:
    rows = sizes["num_tokens"] * sizes["d"] * itemsize
    return Cost(read=2 * rows + sizes["d"] * itemsize, written=2 * rows)


RMS_NORM = Contract(
    op="rms_norm",
    summary="x / rms(x) * weight over the last dimension; x may be [tokens, heads, d], num_tokens then counts its rows",
    phase="both",
    tensors=(
        TensorArg("x", ("num_tokens", "d"), views=("row_strided", "strided", "offset")),
        TensorArg("weight", ("d",), views=("offset",)),
        TensorArg("out", ("num_tokens", "d"), written=True, views=("row_strided", "strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima=_MAXIMA,
    sweep=_SWEEP,
    defaults={"num_tokens": 1, "d": 4096},
    cost=_rms_norm_cost,
    free="num_tokens",
    hard=("large_magnitude", "zero_rows"),
)

ADD_RMS_NORM = Contract(
    op="add_rms_norm",
    summary="residual += x in place, then residual / rms(residual) * weight",
    phase="both",
    tensors=(
        TensorArg("x", ("num_tokens", "d"), views=("row_strided", "offset")),
        TensorArg("residual", ("num_tokens", "d"), written=True, views=("row_strided", "offset")),
        TensorArg("weight", ("d",), views=("offset",)),
        TensorArg("out", ("num_tokens", "d"), written=True, views=("row_strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima=_MAXIMA,
    sweep=_SWEEP,
    defaults={"num_tokens": 1, "d": 4096},
    cost=_add_rms_norm_cost,
    free="num_tokens",
    hard=("large_magnitude", "zero_rows"),
)

_TRITON = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))
_NVRTC = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("nvrtc",))

FAMILY = Family(
    name="norm",
    contracts=(RMS_NORM, ADD_RMS_NORM),
    rows=(
        KernelSpec(
            op="rms_norm",
            name="torch.rms_norm",
            target="rapid_llm.kernels.ops.fallback.norm:rms_norm",
            prepare="prepare_rms_norm",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="add_rms_norm",
            name="torch.add_rms_norm",
            target="rapid_llm.kernels.ops.fallback.norm:add_rms_norm",
            prepare="prepare_add_rms_norm",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="rms_norm",
            name="triton.rms_norm",
            target="rapid_llm.kernels.ops.norm.rms_norm:rms_norm",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
        KernelSpec(
            op="add_rms_norm",
            name="triton.add_rms_norm",
            target="rapid_llm.kernels.ops.norm.rms_norm:add_rms_norm",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
        KernelSpec(
            op="add_rms_norm",
            name="nvrtc.add_rms_norm",
            target="rapid_llm.kernels.ops.norm.add_rms_norm_cuda:add_rms_norm",
            requires=_NVRTC,
            dtypes=FLOATS,
            priority=5,  # below Triton's: it serves where it was measured to be faster, or where there is no Triton
        ),
    ),
)
