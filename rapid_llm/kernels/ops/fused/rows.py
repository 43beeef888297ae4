"""Rows and contracts of the fused family."""

from dataclasses import replace

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, Family, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")
_NATIVE = CapabilityRequirement(device_types=("cuda",), min_sm=89, native_fp8=True, packages=("triton",), min_triton=(3, 6))
_TRITON = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))
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


def _kv_write_sizes(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, num_rows: int) -> dict[str, int]:
    """One entry of the sweep of what writes K and V."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return {"num_tokens": num_tokens, **heads, "num_rows": num_rows}


def _kv_write_cost(sizes: Sizes, itemsize: int) -> Cost:
    heads = sizes["num_heads"] + 2 * sizes["num_kv_heads"]
    moved = sizes["num_tokens"] * heads * sizes["head_dim"] * itemsize
    return Cost(read=moved + sizes["num_tokens"] * 4 * (sizes["head_dim"] + 2), written=moved)


_HEADS = ("row_strided", "strided", "offset")
_Q, _K, _V = (
    TensorArg("q", ("num_tokens", "num_heads", "head_dim"), written=True, views=_HEADS),
    TensorArg("k", ("num_tokens", "num_kv_heads", "head_dim"), views=_HEADS),
    TensorArg("v", ("num_tokens", "num_kv_heads", "head_dim"), views=_HEADS),
)
_PLACES = (
    TensorArg("positions", ("num_tokens",), dtype="int32", views=("offset",)),
    TensorArg("cos_sin", ("max_positions", "head_dim"), dtype="float32", views=("row_strided",)),
    TensorArg("slot_mapping", ("num_tokens",), dtype="int32", views=("offset",)),
    TensorArg("k_pool", ("num_rows", "num_kv_heads", "head_dim"), written=True, views=("row_strided",)),
    TensorArg("v_pool", ("num_rows", "num_kv_heads", "head_dim"), written=True, views=("row_strided",)),
)

ROPE_KV_WRITE = Contract(
    op="rope_kv_write",
    summary="rotates every q head in place (NeoX) and writes each token's K, rotated, and V into the pool row of slot_mapping",
    phase="both",
    tensors=(_Q, _K, _V, *_PLACES),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "num_heads": 256, "num_kv_heads": 256, "head_dim": 512, "num_rows": (1 << 31) - 1},
    sweep=(
        _kv_write_sizes(0, 4, 2, 64, 16),
        _kv_write_sizes(1, 9, 3, 64, 65),
        _kv_write_sizes(1, 32, 8, 128, 17),
        _kv_write_sizes(5, 3, 1, 80, 33),
        _kv_write_sizes(9, 5, 5, 96, 64),
        _kv_write_sizes(4, 14, 2, 112, 40),
        _kv_write_sizes(2, 8, 1, 256, 9),
        _kv_write_sizes(18, 7, 1, 128, 130),
    ),
    defaults=_kv_write_sizes(1, 32, 8, 128, 1 << 16),
    cost=_kv_write_cost,
    free="num_tokens",
    ids={
        "positions": "0 <= id < max_positions",
        "slot_mapping": "any int32, those in 0 <= id < num_rows distinct; the others are skipped",
    },
    hard=("padding_slots", "large_magnitude"),
)

QK_NORM_ROPE_KV_WRITE = replace(
    ROPE_KV_WRITE,
    op="qk_norm_rope_kv_write",
    summary="norms every q and k head by its root mean square, rotates both (NeoX), q in place, and writes each token's K and V "
    "into the pool row of slot_mapping",
    tensors=(
        *(_Q, _K, _V),
        TensorArg("q_weight", ("head_dim",), views=("offset",)),
        TensorArg("k_weight", ("head_dim",), views=("offset",)),
        *_PLACES,
    ),
    defaults=_kv_write_sizes(1, 16, 8, 128, 1 << 16),
)

FAMILY = Family(
    name="fused",
    contracts=(ADD_RMS_NORM_FP8, SWIGLU_FP8, ROPE_KV_WRITE, QK_NORM_ROPE_KV_WRITE),
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
        KernelSpec(
            op="rope_kv_write",
            name="torch.rope_kv_write",
            target="rapid_llm.kernels.ops.fallback.fused:rope_kv_write",
            requires=_ANY,
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="rope_kv_write",
            name="triton.rope_kv_write",
            target="rapid_llm.kernels.ops.fused.rope_kv_write:rope_kv_write",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
        KernelSpec(
            op="qk_norm_rope_kv_write",
            name="torch.qk_norm_rope_kv_write",
            target="rapid_llm.kernels.ops.fallback.fused:qk_norm_rope_kv_write",
            requires=_ANY,
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="qk_norm_rope_kv_write",
            name="triton.qk_norm_rope_kv_write",
            target="rapid_llm.kernels.ops.fused.rope_kv_write:qk_norm_rope_kv_write",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
    ),
)
