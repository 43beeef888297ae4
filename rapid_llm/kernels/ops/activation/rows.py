"""Rows and contract of the activation family."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, Family, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")


def _swiglu_cost(sizes: Sizes, itemsize: int) -> Cost:
    row = sizes["num_tokens"] * sizes["d"] * itemsize
    return Cost(read=2 * row, written=row)


SWIGLU = Contract(
    op="swiglu",
    summary="silu(gate) * up over a fused gate-up row",
    phase="both",
    tensors=(
        TensorArg("gate_up", ("num_tokens", "2*d"), views=("row_strided", "offset")),
        TensorArg("out", ("num_tokens", "d"), written=True, views=("row_strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "d": 1 << 17},
    sweep=(
        {"num_tokens": 0, "d": 64},
        {"num_tokens": 1, "d": 128},
        {"num_tokens": 7, "d": 1000},
        {"num_tokens": 3, "d": 1025},
        {"num_tokens": 130, "d": 1536},
    ),
    defaults={"num_tokens": 1, "d": 14336},
    cost=_swiglu_cost,
    free="num_tokens",
    hard=("large_magnitude",),
)

_TRITON = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))

FAMILY = Family(
    name="activation",
    contracts=(SWIGLU,),
    rows=(
        KernelSpec(
            op="swiglu",
            name="torch.swiglu",
            target="rapid_llm.kernels.ops.fallback.activation:swiglu",
            prepare="prepare_swiglu",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="swiglu",
            name="triton.swiglu",
            target="rapid_llm.kernels.ops.activation.swiglu:swiglu",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
    ),
)
