"""Rows and contracts of the moe family."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, Family, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")
_ANY = CapabilityRequirement(device_types=("cuda", "cpu"))
_TRITON = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))
_TRITON_FP8 = CapabilityRequirement(device_types=("cuda",), min_sm=89, native_fp8=True, packages=("triton",), min_triton=(3, 6))
_WEIGHTS = 1 << 10  # tokens from which on every expert counts as read, so that the power below stays cheap


def _route_cost(sizes: Sizes, itemsize: int) -> Cost:
    tokens = sizes["num_tokens"]
    return Cost(read=tokens * sizes["num_experts"] * itemsize, written=tokens * sizes["top_k"] * 8)


def _experts_read(sizes: Sizes) -> float:
    """How many experts a step of these sizes goes to, if each token draws its own at random."""
    experts, tokens = sizes["num_experts"], min(sizes["num_tokens"], _WEIGHTS)
    return experts * (1 - (1 - min(sizes["top_k"] / experts, 1.0)) ** tokens)


def _moe_cost(sizes: Sizes, itemsize: int, weight_bits: int, scale_bytes: int = 0) -> Cost:
    """Of experts whose weights take ``weight_bits`` an element, and ``scale_bytes`` more for each group of each output."""
    tokens, hidden, inner = sizes["num_tokens"], sizes["hidden_size"], sizes["intermediate_size"]
    group = sizes.get("group", 0)
    scales = 2 * inner * _groups(hidden, group) + hidden * _groups(inner, group)
    expert = 3 * hidden * inner * weight_bits // 8 + scales * scale_bytes
    rows = tokens * hidden * itemsize
    read = rows + tokens * sizes["top_k"] * 8 + int(_experts_read(sizes) * expert)
    return Cost(read=read, written=rows, flops=6 * tokens * sizes["top_k"] * hidden * inner)


def _groups(k: int, group: int) -> int:
    return -(-k // group) if group else 1


def _dense_cost(sizes: Sizes, itemsize: int) -> Cost:
    return _moe_cost(sizes, itemsize, 8 * itemsize)


def _byte_cost(sizes: Sizes, itemsize: int) -> Cost:
    return _moe_cost(sizes, itemsize, 8, 4)


def _fp8_cost(sizes: Sizes, itemsize: int) -> Cost:
    return _moe_cost(sizes, itemsize, 8, 0 if sizes["group"] else 4)  # a scale for 128 x 128 elements is nothing


def _int4_cost(sizes: Sizes, itemsize: int) -> Cost:
    return _moe_cost(sizes, itemsize, 4, itemsize)


def _mxfp4_cost(sizes: Sizes, itemsize: int) -> Cost:
    return _moe_cost({**sizes, "group": 32}, itemsize, 4, 1)


_ROWS = ("row_strided", "offset")
_X = TensorArg("x", ("num_tokens", "hidden_size"), views=_ROWS)
_IDS = TensorArg("ids", ("num_tokens", "top_k"), dtype="int32", views=_ROWS)
_ROUTING_WEIGHTS = TensorArg("weights", ("num_tokens", "top_k"), dtype="float32", views=_ROWS)
_OUT = TensorArg("out", ("num_tokens", "hidden_size"), written=True, views=_ROWS)


def _weights(dtype: str, hidden: str = "hidden_size", inner: str = "intermediate_size") -> tuple[TensorArg, TensorArg]:
    return (
        TensorArg("gate_up", ("num_experts", "2*intermediate_size", hidden), dtype=dtype, views=("strided", "offset")),
        TensorArg("down", ("num_experts", "hidden_size", inner), dtype=dtype, views=("strided", "offset")),
    )


def _scales(
    suffix: str, dtype: str, rows: tuple[str, str] = ("2*intermediate_size", "hidden_size")
) -> tuple[TensorArg, TensorArg]:
    return (
        TensorArg(f"gate_up_{suffix}", ("num_experts", rows[0], "hidden_groups"), dtype=dtype, views=("strided", "offset")),
        TensorArg(f"down_{suffix}", ("num_experts", rows[1], "inner_groups"), dtype=dtype, views=("strided", "offset")),
    )


_MAXIMA = {"num_tokens": 1 << 20, "num_experts": 1 << 10, "top_k": 32, "hidden_size": 1 << 15, "intermediate_size": 1 << 16}
_IDS_SAY = {"ids": "0 <= id < num_experts; any other, -1 first of all, is nobody's"}
_QWEN = {"num_tokens": 1, "num_experts": 128, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768}


def _point(tokens: int, experts: int, top_k: int, hidden: int, inner: int, group: int | None = None) -> Sizes:
    sizes = {
        "num_tokens": tokens,
        "num_experts": experts,
        "top_k": top_k,
        "hidden_size": hidden,
        "intermediate_size": inner,
    }
    return sizes if group is None else {**sizes, "group": group}


ROUTE_EXPERTS = Contract(
    op="route_experts",
    summary="the top_k experts of each token by softmax or sigmoid scores, within its best groups of experts, and their weights",
    phase="both",
    tensors=(
        TensorArg("logits", ("num_tokens", "num_experts"), views=_ROWS),
        TensorArg("out_ids", ("num_tokens", "top_k"), dtype="int32", written=True, views=_ROWS),
        TensorArg("out_weights", ("num_tokens", "top_k"), dtype="float32", written=True, views=_ROWS),
        TensorArg("bias", ("num_experts",), dtype="float32", views=("offset",)),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "num_experts": 1 << 10, "top_k": 32},
    sweep=(
        {"num_tokens": 0, "num_experts": 8, "top_k": 2},
        {"num_tokens": 1, "num_experts": 4, "top_k": 1},
        {"num_tokens": 5, "num_experts": 60, "top_k": 4},
        {"num_tokens": 6, "num_experts": 64, "top_k": 6},
        {"num_tokens": 3, "num_experts": 128, "top_k": 8},
        {"num_tokens": 4, "num_experts": 160, "top_k": 6},
        {"num_tokens": 2, "num_experts": 256, "top_k": 8},
        {"num_tokens": 3, "num_experts": 512, "top_k": 10},
    ),
    defaults={"num_tokens": 1, "num_experts": 128, "top_k": 8},
    cost=_route_cost,
    free="num_tokens",
    hard=("nan_row", "all_minus_inf", "plus_inf", "ties", "large_magnitude"),
)

FUSED_MOE = Contract(
    op="fused_moe",
    summary="the weighted sum over a token's experts of down(silu(gate x) * up x)",
    phase="both",
    tensors=(_X, *_weights("compute"), _IDS, _ROUTING_WEIGHTS, _OUT),
    dtypes=FLOATS,
    maxima=_MAXIMA,
    sweep=(
        _point(0, 8, 2, 64, 32),
        _point(1, 8, 2, 64, 48),
        _point(3, 4, 1, 129, 37),
        _point(3, 20, 8, 128, 32),
        _point(4, 16, 10, 72, 40),
        _point(3, 512, 8, 32, 32),
        _point(21, 6, 3, 96, 80),
        _point(70, 2, 2, 64, 32),
    ),
    defaults=_QWEN,
    cost=_dense_cost,
    free="num_tokens",
    ids=_IDS_SAY,
    hard=("large_magnitude", "one_expert", "foreign_ids", "nan_token"),
)

FUSED_MOE_FP8 = Contract(
    op="fused_moe_fp8",
    summary="fused_moe of e4m3 experts and of activations quantised to e4m3: a scale a token and an output (group = 0), or for "
    "every 128 of k and every 128 x 128 of a weight (group = 128)",
    phase="both",
    tensors=(
        _X,
        *_weights("float8_e4m3fn"),
        *_scales("scales", "float32", ("gate_up_scale_rows", "down_scale_rows")),
        _IDS,
        _ROUTING_WEIGHTS,
        _OUT,
    ),
    dtypes=FLOATS,
    maxima={**_MAXIMA, "group": 128},
    sweep=(
        _point(0, 8, 2, 64, 32, 0),
        _point(1, 8, 2, 64, 48, 0),
        _point(3, 4, 1, 160, 80, 128),
        _point(3, 20, 8, 128, 32, 0),
        _point(3, 6, 5, 272, 144, 128),
        _point(3, 512, 8, 32, 32, 0),
        _point(70, 2, 2, 256, 64, 128),
    ),
    defaults={**_QWEN, "group": 0},
    cost=_fp8_cost,
    free="num_tokens",
    ids=_IDS_SAY,
    hard=("large_magnitude", "one_expert", "foreign_ids", "nan_token"),
)

FUSED_MOE_W8A16 = Contract(
    op="fused_moe_w8a16",
    summary="fused_moe of int8 or e4m3 experts: a scale for each output (group = 0), or for each group along k",
    phase="both",
    tensors=(_X, *_weights("int8"), *_scales("scales", "float32"), _IDS, _ROUTING_WEIGHTS, _OUT),
    dtypes=FLOATS,
    maxima={**_MAXIMA, "group": 1 << 14},
    sweep=(
        _point(0, 8, 2, 64, 32, 0),
        _point(1, 8, 2, 64, 48, 0),
        _point(3, 5, 1, 129, 37, 0),
        _point(3, 20, 8, 64, 32, 16),
        _point(3, 7, 4, 256, 128, 128),
        _point(3, 512, 8, 32, 32, 32),
        _point(70, 2, 2, 64, 64, 64),
    ),
    defaults={**_QWEN, "group": 0},
    cost=_byte_cost,
    free="num_tokens",
    ids=_IDS_SAY,
    hard=("foreign_ids", "nan_token", "far_scales", "every_code"),
)

FUSED_MOE_W4A16 = Contract(
    op="fused_moe_w4a16",
    summary="fused_moe of experts of 4-bit codes, two a byte: a scale and a zero point for each group along k (group = 0: "
    "for each output)",
    phase="both",
    tensors=(
        _X,
        *_weights("uint8", "half_hidden", "half_inner"),
        *_scales("scales", "compute"),
        _IDS,
        _ROUTING_WEIGHTS,
        _OUT,
        *_scales("zeros", "uint8"),
    ),
    dtypes=FLOATS,
    maxima={**_MAXIMA, "group": 1024},
    sweep=(
        _point(0, 8, 2, 64, 32, 16),
        _point(1, 8, 2, 64, 48, 16),
        _point(3, 5, 1, 130, 38, 0),
        _point(3, 20, 8, 128, 32, 32),
        _point(3, 7, 4, 256, 128, 128),
        _point(3, 512, 8, 32, 32, 32),
        _point(70, 2, 2, 64, 64, 64),
    ),
    defaults={**_QWEN, "group": 128},
    cost=_int4_cost,
    free="num_tokens",
    ids=_IDS_SAY,
    hard=("foreign_ids", "nan_token", "far_scales", "every_code"),
)

FUSED_MOE_MXFP4 = Contract(
    op="fused_moe_mxfp4",
    summary="fused_moe of experts of e2m1 codes, two a byte, with a power of two as the scale of every 32 along k",
    phase="both",
    tensors=(
        _X,
        *_weights("uint8", "half_hidden", "half_inner"),
        *_scales("scales", "uint8"),
        _IDS,
        _ROUTING_WEIGHTS,
        _OUT,
    ),
    dtypes=FLOATS,
    maxima=_MAXIMA,
    sweep=(
        _point(0, 8, 2, 64, 32),
        _point(1, 8, 2, 64, 96),
        _point(3, 5, 1, 130, 38),
        _point(3, 20, 8, 128, 32),
        _point(3, 6, 5, 160, 96),
        _point(3, 512, 8, 32, 32),
        _point(70, 2, 2, 64, 64),
    ),
    defaults=_QWEN,
    cost=_mxfp4_cost,
    free="num_tokens",
    ids=_IDS_SAY,
    hard=("foreign_ids", "nan_token", "far_scales", "every_code"),
)

_CONTRACTS = (ROUTE_EXPERTS, FUSED_MOE, FUSED_MOE_FP8, FUSED_MOE_W8A16, FUSED_MOE_W4A16, FUSED_MOE_MXFP4)


def _rows(op: str) -> tuple[KernelSpec, ...]:
    native = KernelSpec(
        op=op,
        name=f"triton.{op}",
        target=f"rapid_llm.kernels.ops.moe.{'routing' if op == 'route_experts' else 'fused_moe'}:{op}",
        requires=_TRITON_FP8 if op == "fused_moe_fp8" else _TRITON,
        dtypes=FLOATS,
        priority=10,
    )
    return (
        KernelSpec(
            op=op,
            name=f"torch.{op}",
            target=f"rapid_llm.kernels.ops.fallback.moe:{op}",
            requires=_ANY,
            dtypes=FLOATS,
            fallback=True,
            library=op != "route_experts",
        ),
        native,
    )


FAMILY = Family(name="moe", contracts=_CONTRACTS, rows=tuple(row for contract in _CONTRACTS for row in _rows(contract.op)))
