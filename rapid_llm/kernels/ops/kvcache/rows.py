"""Rows and contracts of the kvcache family."""

from dataclasses import replace

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, Family, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")


def _buffer_sizes(num_tokens: int, num_kv_heads: int, head_dim: int, num_rows: int) -> dict[str, int]:
    """One entry of update_kv_buffer's sweep."""
    return {"num_tokens": num_tokens, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "num_rows": num_rows}


def _index_sizes(num_updates: int, num_table_rows: int, num_columns: int) -> dict[str, int]:
    """One entry of update_kv_index's sweep."""
    return {"num_updates": num_updates, "num_table_rows": num_table_rows, "num_columns": num_columns}


def _buffer_cost(sizes: Sizes, itemsize: int) -> Cost:
    rows = 2 * sizes["num_tokens"] * sizes["num_kv_heads"] * sizes["head_dim"] * itemsize
    return Cost(read=rows + 4 * sizes["num_tokens"], written=rows)


def _fp8_buffer_cost(sizes: Sizes, itemsize: int) -> Cost:
    elements, heads = 2 * sizes["num_tokens"] * sizes["num_kv_heads"] * sizes["head_dim"], sizes["num_kv_heads"]
    return Cost(read=elements * itemsize + 4 * sizes["num_tokens"] + 8 * heads, written=elements)


def _index_cost(sizes: Sizes, itemsize: int) -> Cost:
    return Cost(read=12 * sizes["num_updates"], written=4 * sizes["num_updates"])


UPDATE_KV_BUFFER = Contract(
    op="update_kv_buffer",
    summary="writes each token's K and V into the pool row that slot_mapping names; the pools are halves of one buffer or apart",
    phase="both",
    tensors=(
        TensorArg("k", ("num_tokens", "num_kv_heads", "head_dim"), views=("row_strided", "strided", "offset")),
        TensorArg("v", ("num_tokens", "num_kv_heads", "head_dim"), views=("row_strided", "strided", "offset")),
        TensorArg("slot_mapping", ("num_tokens",), dtype="int32", views=("offset",)),
        TensorArg("k_pool", ("num_rows", "num_kv_heads", "head_dim"), written=True, views=("row_strided",)),
        TensorArg("v_pool", ("num_rows", "num_kv_heads", "head_dim"), written=True, views=("row_strided",)),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "num_kv_heads": 256, "head_dim": 512, "num_rows": (1 << 31) - 1},
    sweep=(
        _buffer_sizes(0, 8, 128, 64),
        _buffer_sizes(1, 3, 64, 128),
        _buffer_sizes(1, 8, 128, 257),
        _buffer_sizes(65, 2, 80, 300),
        _buffer_sizes(3, 1, 96, 17),
        _buffer_sizes(5, 5, 112, 40),
        _buffer_sizes(4, 16, 192, 33),
        _buffer_sizes(9, 2, 256, 64),
        _buffer_sizes(513, 4, 64, 1024),
    ),
    defaults=_buffer_sizes(1, 8, 128, 1 << 16),
    cost=_buffer_cost,
    free="num_tokens",
    ids={"slot_mapping": "any int32, those in 0 <= id < num_rows distinct; the others are skipped"},
    hard=("padding_slots",),
)

UPDATE_KV_BUFFER_FP8 = Contract(
    op="update_kv_buffer_fp8",
    summary="writes each token's K and V, over a scale a head and rounded to e4m3, into the pool row that slot_mapping names",
    phase="both",
    tensors=(
        *UPDATE_KV_BUFFER.tensors[:3],
        *(replace(pool, dtype="float8_e4m3fn") for pool in UPDATE_KV_BUFFER.tensors[3:]),
        TensorArg("k_scale", ("num_kv_heads",), dtype="float32", views=("offset",)),
        TensorArg("v_scale", ("num_kv_heads",), dtype="float32", views=("offset",)),
    ),
    dtypes=FLOATS,
    maxima=UPDATE_KV_BUFFER.maxima,
    sweep=(
        _buffer_sizes(0, 8, 128, 64),
        _buffer_sizes(1, 3, 64, 128),
        _buffer_sizes(1, 8, 128, 257),
        _buffer_sizes(33, 2, 80, 150),
        _buffer_sizes(3, 1, 96, 17),
        _buffer_sizes(4, 16, 192, 33),
        _buffer_sizes(9, 2, 256, 64),
    ),
    defaults=UPDATE_KV_BUFFER.defaults,
    cost=_fp8_buffer_cost,
    free="num_tokens",
    ids=UPDATE_KV_BUFFER.ids,
    hard=("padding_slots", "past_the_range", "far_scales"),
)

UPDATE_KV_INDEX = Contract(
    op="update_kv_index",
    summary="page_table[table_rows[i], columns[i]] = pages[i]",
    phase="both",
    tensors=(
        TensorArg("page_table", ("num_table_rows", "num_columns"), dtype="int32", written=True, views=("row_strided", "offset")),
        TensorArg("table_rows", ("num_updates",), dtype="int32", views=("offset",)),
        TensorArg("columns", ("num_updates",), dtype="int32", views=("offset",)),
        TensorArg("pages", ("num_updates",), dtype="int32", views=("offset",)),
    ),
    dtypes=FLOATS,
    maxima={"num_updates": 1 << 20, "num_table_rows": 1 << 16, "num_columns": 1 << 20},
    sweep=(
        _index_sizes(0, 4, 8),
        _index_sizes(1, 1, 1),
        _index_sizes(7, 5, 33),
        _index_sizes(65, 9, 129),
        _index_sizes(130, 256, 512),
    ),
    defaults=_index_sizes(8, 256, 8192),
    cost=_index_cost,
    ids={
        "table_rows": "any int32; outside 0 <= id < num_table_rows skipped; no (row, column) twice",
        "columns": "any int32; outside 0 <= id < num_columns skipped",
        "pages": "any int32",
    },
    hard=("padding_entries",),
)

_TRITON = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))

FAMILY = Family(
    name="kvcache",
    contracts=(UPDATE_KV_BUFFER, UPDATE_KV_BUFFER_FP8, UPDATE_KV_INDEX),
    rows=(
        KernelSpec(
            op="update_kv_buffer",
            name="torch.update_kv_buffer",
            target="rapid_llm.kernels.ops.fallback.kvcache:update_kv_buffer",
            prepare="prepare_update_kv_buffer",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="update_kv_buffer_fp8",
            name="torch.update_kv_buffer_fp8",
            target="rapid_llm.kernels.ops.fallback.kvcache:update_kv_buffer_fp8",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="update_kv_index",
            name="torch.update_kv_index",
            target="rapid_llm.kernels.ops.fallback.kvcache:update_kv_index",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="update_kv_buffer",
            name="triton.update_kv_buffer",
            target="rapid_llm.kernels.ops.kvcache.update_kv_buffer:update_kv_buffer",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
        KernelSpec(
            op="update_kv_buffer_fp8",
            name="triton.update_kv_buffer_fp8",
            target="rapid_llm.kernels.ops.kvcache.update_kv_buffer_fp8:update_kv_buffer_fp8",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
        KernelSpec(
            op="update_kv_index",
            name="triton.update_kv_index",
            target="rapid_llm.kernels.ops.kvcache.update_kv_index:update_kv_index",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
    ),
)
