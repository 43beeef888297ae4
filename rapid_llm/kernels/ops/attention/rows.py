"""Rows and contracts of the attention family: one op for each mapping, prefill and decode, and for each kind of pool."""

from dataclasses import replace

from rapid_llm.kernels.ops.interfaces import (
    CapabilityRequirement,
    Contract,
    Cost,
    Family,
    KernelSpec,
    Limit,
    Phase,
    Sizes,
    TensorArg,
)

FLOATS = ("float32", "bfloat16", "float16")


def _sizes(heads: tuple[int, int], head_dim: int, num_seqs: int, q_len: int, kv_len: int, page_size: int = 16) -> dict[str, int]:
    """One entry of a sweep; ``heads`` is (num_heads, num_kv_heads), the lengths are those of the longest sequence."""
    return {
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": head_dim,
        "page_size": page_size,
        "num_seqs": num_seqs,
        "q_len": q_len,
        "kv_len": kv_len,
    }


_POOL_DIMS = ("num_rows", "num_kv_heads", "head_dim")
_POOLS_AND_TABLE = (
    TensorArg("k_pool", _POOL_DIMS, views=("row_strided",)),
    TensorArg("v_pool", _POOL_DIMS, views=("row_strided",)),
    TensorArg("page_table", ("num_table_rows", "num_columns"), dtype="int32", views=("row_strided", "offset")),
    TensorArg("table_rows", ("num_seqs",), dtype="int32", views=("offset",)),
)
_TABLE_IDS = {
    "page_table": "0 <= id < num_rows / page_size in the columns that seq_lens reaches; the others may hold anything",
    "table_rows": "0 <= id < num_table_rows",
}
_MAXIMA = {"num_heads": 256, "num_kv_heads": 256, "head_dim": 512, "page_size": 256, "num_seqs": 1 << 16, "kv_len": 1 << 22}


_SCALES = tuple(TensorArg(name, ("num_kv_heads",), dtype="float32", views=("offset",)) for name in ("k_scale", "v_scale"))


def _of_e4m3(contract: Contract, sweep: tuple[Sizes, ...]) -> Contract:
    """The same over pools of e4m3 with a scale a head: two of their own, or the halves of one, whose rows are of even size."""
    pools = {"k_pool": ("row_strided",), "v_pool": ()}
    *first, out = (
        replace(arg, dtype="float8_e4m3fn", views=pools[arg.name]) if arg.name in pools else arg for arg in contract.tensors
    )

    def cost(sizes: Sizes, itemsize: int) -> Cost:
        plain = contract.cost(sizes, itemsize)
        keys = 2 * sizes["num_seqs"] * sizes["kv_len"] * sizes["num_kv_heads"] * sizes["head_dim"]
        return replace(plain, read=plain.read - keys * (itemsize - 1) + 8 * sizes["num_kv_heads"])

    return replace(
        contract,
        op=f"{contract.op}_fp8",
        summary=f"{contract.summary}; K and V are e4m3 numbers times a scale a KV head",
        tensors=(*first, *_SCALES, out),
        sweep=sweep,
        cost=cost,
        hard=(*contract.hard, "far_scales"),
    )


def _prefill_cost(sizes: Sizes, itemsize: int) -> Cost:
    """Query i of a chunk sees the keys before the chunk and i + 1 of its own."""
    seqs, q_len, kv_len, dim = sizes["num_seqs"], sizes["q_len"], sizes["kv_len"], sizes["head_dim"]
    queries = seqs * q_len * sizes["num_heads"] * dim * itemsize
    keys = 2 * seqs * kv_len * sizes["num_kv_heads"] * dim * itemsize
    pairs = q_len * max(kv_len - q_len, 0) + q_len * (q_len + 1) // 2
    return Cost(read=queries + keys, written=queries, flops=4 * seqs * pairs * sizes["num_heads"] * dim)


def _decode_cost(sizes: Sizes, itemsize: int) -> Cost:
    seqs, kv_len, dim = sizes["num_seqs"], sizes["kv_len"], sizes["head_dim"]
    queries = seqs * sizes["num_heads"] * dim * itemsize
    keys = 2 * seqs * kv_len * sizes["num_kv_heads"] * dim * itemsize
    return Cost(read=queries + keys, written=queries, flops=4 * seqs * kv_len * sizes["num_heads"] * dim)


FLASHATTENTION2_NOPAD = Contract(
    op="flashattention2_nopad",
    summary="causal attention of packed ragged prompts, or chunks of them, over keys that are read through the page table",
    phase="prefill",
    tensors=(
        TensorArg("q", ("num_tokens", "num_heads", "head_dim"), views=("row_strided", "strided", "offset")),
        *_POOLS_AND_TABLE,
        TensorArg("cu_seqlens_q", ("num_seqs+1",), dtype="int32", views=("offset",)),
        TensorArg("seq_lens", ("num_seqs",), dtype="int32", views=("offset",)),
        TensorArg("out", ("num_tokens", "num_heads", "head_dim"), written=True, views=("row_strided", "strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima={**_MAXIMA, "q_len": 1 << 20},
    sweep=(
        _sizes((8, 2), 64, 0, 0, 0),
        _sizes((8, 2), 64, 2, 0, 5),
        _sizes((9, 3), 64, 1, 1, 1),
        _sizes((9, 3), 64, 3, 33, 33),
        _sizes((4, 4), 80, 2, 65, 65),
        _sizes((8, 4), 96, 3, 17, 100),
        _sizes((6, 2), 112, 3, 40, 70),
        _sizes((8, 2), 128, 4, 129, 129),
        _sizes((5, 1), 192, 2, 20, 55),
        _sizes((6, 1), 256, 2, 7, 130),
        _sizes((7, 1), 64, 3, 16, 48, page_size=1),
        _sizes((8, 1), 64, 3, 16, 129, page_size=64),
        # By their sums the views of these are ones that TMA reads, in bf16 or in fp16: other calls the Gluon row hands on.
        _sizes((4, 2), 128, 2, 140, 203),
        _sizes((4, 1), 128, 2, 33, 95, page_size=128),
        _sizes((2, 1), 128, 2, 140, 201, page_size=64),
        _sizes((2, 1), 128, 1, 40, 1102, page_size=8),
        _sizes((2, 1), 128, 1, 40, 1103),
        _sizes((2, 2), 64, 1, 200, 500),
    ),
    defaults=_sizes((32, 8), 128, 1, 512, 512),
    cost=_prefill_cost,
    hidden=("kv_len",),
    ids={
        **_TABLE_IDS,
        "cu_seqlens_q": "0 or more first, never falling, at most num_tokens; a sequence with no query tokens is skipped",
        "seq_lens": "query tokens of the sequence <= length <= num_columns * page_size",
    },
    hard=("large_scores",),
)

FLASH_DECODING = Contract(
    op="flash_decoding",
    summary="attention of one query per sequence over all its keys, read through the page table",
    phase="decode",
    tensors=(
        TensorArg("q", ("num_seqs", "num_heads", "head_dim"), views=("row_strided", "strided", "offset")),
        *_POOLS_AND_TABLE,
        TensorArg("seq_lens", ("num_seqs",), dtype="int32", views=("offset",)),
        TensorArg("out", ("num_seqs", "num_heads", "head_dim"), written=True, views=("row_strided", "strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima={**_MAXIMA, "q_len": 1},
    sweep=(
        _sizes((8, 2), 64, 0, 1, 0),
        _sizes((8, 2), 64, 2, 1, 0),
        _sizes((9, 3), 64, 1, 1, 1),
        _sizes((9, 3), 64, 1, 1, 1000),
        _sizes((4, 4), 80, 3, 1, 65),
        _sizes((8, 4), 96, 5, 1, 16),
        _sizes((6, 2), 112, 4, 1, 17),
        _sizes((32, 8), 128, 7, 1, 129),
        _sizes((5, 1), 192, 2, 1, 100),
        _sizes((6, 1), 256, 3, 1, 257),
        _sizes((7, 1), 64, 9, 1, 33, page_size=1),
        _sizes((8, 1), 64, 33, 1, 200, page_size=64),
    ),
    defaults=_sizes((32, 8), 128, 1, 1, 4096),
    cost=_decode_cost,
    hidden=("kv_len",),
    free="num_seqs",
    ids={
        **_TABLE_IDS,
        "table_rows": "0 <= id < num_table_rows; anything where seq_lens is 0",
        "seq_lens": "0 <= length <= num_columns * page_size; 0 is padding and gives zeros",
    },
    hard=("large_scores",),
)

FLASHATTENTION2_NOPAD_FP8 = _of_e4m3(
    FLASHATTENTION2_NOPAD,
    sweep=(
        _sizes((8, 2), 64, 0, 0, 0),
        _sizes((9, 3), 64, 1, 1, 1),
        _sizes((9, 3), 64, 3, 33, 33),
        _sizes((4, 4), 80, 2, 65, 65),
        _sizes((8, 2), 128, 4, 129, 129),
        _sizes((5, 1), 192, 2, 20, 55),
        _sizes((6, 1), 256, 2, 7, 130),
        _sizes((7, 1), 64, 3, 16, 48, page_size=1),
        _sizes((2, 2), 64, 1, 200, 500),
    ),
)

FLASH_DECODING_FP8 = _of_e4m3(
    FLASH_DECODING,
    sweep=(
        _sizes((8, 2), 64, 0, 1, 0),
        _sizes((8, 2), 64, 2, 1, 0),
        _sizes((9, 3), 64, 1, 1, 1),
        _sizes((9, 3), 64, 1, 1, 1000),
        _sizes((4, 4), 80, 3, 1, 65),
        _sizes((6, 2), 112, 4, 1, 17),
        _sizes((32, 8), 128, 7, 1, 129),
        _sizes((5, 1), 192, 2, 1, 100),
        _sizes((6, 1), 256, 3, 1, 257),
        _sizes((7, 1), 64, 9, 1, 33, page_size=1),
        _sizes((8, 1), 64, 33, 1, 200, page_size=64),
    ),
)

_TRITON = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))
_GLUON = replace(_TRITON, min_sm=90, max_sm=90, min_smem=168_064, max_triton=(3, 6))
_TRITON_LIMITS = {"head_dim": Limit(1, 256), "page_size": Limit(1, 256)}


def _fp8_rows(mapping: str, phase: Phase) -> tuple[KernelSpec, KernelSpec]:
    """Both rows over pools of e4m3."""
    op = f"{mapping}_fp8"
    return (
        KernelSpec(
            op=op,
            name=f"torch.{op}",
            target=f"rapid_llm.kernels.ops.fallback.attention:{op}",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
            phase=phase,
            library=True,
        ),
        KernelSpec(
            op=op,
            name=f"triton.{op}",
            target=f"rapid_llm.kernels.ops.attention.{mapping}:{op}",
            requires=_TRITON,
            dtypes=FLOATS,
            limits={**_TRITON_LIMITS, "head_dim": Limit(2, 256, multiple=2)},
            priority=10,
            phase=phase,
        ),
    )


FAMILY = Family(
    name="attention",
    contracts=(FLASHATTENTION2_NOPAD, FLASHATTENTION2_NOPAD_FP8, FLASH_DECODING, FLASH_DECODING_FP8),
    rows=(
        KernelSpec(
            op="flashattention2_nopad",
            name="torch.flashattention2_nopad",
            target="rapid_llm.kernels.ops.fallback.attention:flashattention2_nopad",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
            phase="prefill",
            library=True,
        ),
        KernelSpec(
            op="flash_decoding",
            name="torch.flash_decoding",
            target="rapid_llm.kernels.ops.fallback.attention:flash_decoding",
            prepare="prepare_flash_decoding",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
            phase="decode",
            library=True,
        ),
        KernelSpec(
            op="flashattention2_nopad",
            name="triton.flashattention2_nopad",
            target="rapid_llm.kernels.ops.attention.flashattention2_nopad:flashattention2_nopad",
            requires=_TRITON,
            dtypes=FLOATS,
            limits=_TRITON_LIMITS,
            priority=10,
            phase="prefill",
        ),
        KernelSpec(
            op="flashattention2_nopad",
            name="gluon.flashattention2_nopad",
            target="rapid_llm.kernels.ops.attention.flashattention2_nopad_gluon:flashattention2_nopad",
            requires=_GLUON,
            dtypes=("bfloat16", "float16"),
            limits={"head_dim": Limit(128, 128), "page_size": Limit(8, 128)},
            priority=5,  # below Triton's: it serves where it was measured to be faster
            phase="prefill",
        ),
        KernelSpec(
            op="flash_decoding",
            name="triton.flash_decoding",
            target="rapid_llm.kernels.ops.attention.flash_decoding:flash_decoding",
            requires=_TRITON,
            dtypes=FLOATS,
            limits=_TRITON_LIMITS,
            priority=10,
            phase="decode",
        ),
        # Results that do not depend on the batch; RAPID_KERNELS asks for it.
        KernelSpec(
            op="flash_decoding",
            name="triton.flash_decoding_fixed_splits",
            target="rapid_llm.kernels.ops.attention.flash_decoding:flash_decoding_fixed_splits",
            requires=_TRITON,
            dtypes=FLOATS,
            limits=_TRITON_LIMITS,
            priority=5,
            phase="decode",
        ),
        *_fp8_rows("flashattention2_nopad", "prefill"),
        *_fp8_rows("flash_decoding", "decode"),
    ),
)
