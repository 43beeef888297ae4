"""Rows and contract of the gather of columns that a weight quantised in an activation order asks of its activations."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")


def _cost(sizes: Sizes, itemsize: int) -> Cost:
    rows = sizes["num_tokens"] * sizes["k"] * itemsize
    return Cost(read=rows + 4 * sizes["k"] if rows else 0, written=rows)


GATHER_COLUMNS = Contract(
    op="gather_columns",
    summary="the columns of x in another order: out[:, j] = x[:, order[j]]",
    phase="both",
    tensors=(
        TensorArg("x", ("num_tokens", "k"), views=("row_strided", "offset")),
        TensorArg("order", ("k",), dtype="int32", views=("offset",)),
        TensorArg("out", ("num_tokens", "k"), written=True, views=("row_strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "k": 1 << 17},
    sweep=(
        {"num_tokens": 0, "k": 64},
        {"num_tokens": 1, "k": 4096},
        {"num_tokens": 3, "k": 1025},
        {"num_tokens": 7, "k": 1000},
        {"num_tokens": 65, "k": 96},
        {"num_tokens": 130, "k": 1536},
    ),
    defaults={"num_tokens": 1, "k": 4096},
    cost=_cost,
    free="num_tokens",
    ids={"order": "0 <= id < k"},
)

CONTRACTS = (GATHER_COLUMNS,)

ROWS = (
    KernelSpec(
        op="gather_columns",
        name="torch.gather_columns",
        target="rapid_llm.kernels.ops.fallback.quantization.columns:gather_columns",
        requires=CapabilityRequirement(device_types=("cuda", "cpu")),
        dtypes=FLOATS,
        fallback=True,
    ),
    KernelSpec(
        op="gather_columns",
        name="triton.gather_columns",
        target="rapid_llm.kernels.ops.quantization.gather_columns:gather_columns",
        requires=CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6)),
        dtypes=FLOATS,
        priority=10,
    ),
)
