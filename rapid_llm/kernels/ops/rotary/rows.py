"""Row and contract of the rotary family."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, Family, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")


def _sizes(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int) -> dict[str, int]:
    """One entry of the sweep."""
    return {
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
    }


def _rope_cost(sizes: Sizes, itemsize: int) -> Cost:
    turned = sizes["num_tokens"] * (sizes["num_heads"] + sizes["num_kv_heads"]) * sizes["rotary_dim"] * itemsize
    return Cost(read=turned + sizes["num_tokens"] * 4 * (sizes["rotary_dim"] + 1), written=turned)


ROPE = Contract(
    op="rope",
    summary="rotates the first rotary_dim entries of every q and k head in place, first half against second (NeoX)",
    phase="both",
    tensors=(
        TensorArg("q", ("num_tokens", "num_heads", "head_dim"), written=True, views=("row_strided", "strided", "offset")),
        TensorArg("k", ("num_tokens", "num_kv_heads", "head_dim"), written=True, views=("row_strided", "strided", "offset")),
        TensorArg("positions", ("num_tokens",), dtype="int32", views=("offset",)),
        TensorArg("cos_sin", ("max_positions", "rotary_dim"), dtype="float32", views=("row_strided",)),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "num_heads": 256, "num_kv_heads": 256, "head_dim": 512, "rotary_dim": 512},
    sweep=(
        _sizes(0, 4, 2, 64, 64),
        _sizes(1, 9, 3, 64, 64),
        _sizes(1, 32, 8, 128, 128),
        _sizes(5, 3, 1, 80, 80),
        _sizes(65, 5, 5, 96, 48),
        _sizes(4, 14, 2, 112, 112),
        _sizes(3, 6, 3, 192, 64),
        _sizes(2, 8, 1, 256, 256),
        _sizes(130, 7, 1, 128, 128),
    ),
    defaults=_sizes(1, 32, 8, 128, 128),
    cost=_rope_cost,
    free="num_tokens",
    ids={"positions": "0 <= id < max_positions"},
    hard=("large_magnitude",),
)

_TRITON = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))

FAMILY = Family(
    name="rotary",
    contracts=(ROPE,),
    rows=(
        KernelSpec(
            op="rope",
            name="torch.rope",
            target="rapid_llm.kernels.ops.fallback.rotary:rope",
            prepare="prepare_rope",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="rope",
            name="triton.rope",
            target="rapid_llm.kernels.ops.rotary.rope:rope",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
    ),
)
