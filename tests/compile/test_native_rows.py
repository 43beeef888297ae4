"""Every native row, compiled for each device that it claims: it fits, spills little, loads in full width, once per tile."""

import pytest

from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.ops.tile_policy import forget_tiles
from rapid_llm.kernels.testing.hazards import store_load_hazards
from tests.compile.early_accesses import early_accesses
from tests.compile.launches import (
    NATIVE_ROWS,
    compiled_call,
    compiled_sweep,
    counts_of,
    each_native_row,
    why_not_compiled,
)

MAX_SPILLED = 256  # bytes of a thread's stack: some values that live across a loop; more is a tile too large
# By row, where it is less. The producer's one warp has 56 registers, and keeps a few numbers of an item on the stack while it
# sends for that item's pages; the consumers spill nothing, which test_gluon_prefill.py looks at.
SPILLED = {"gluon.flashattention2_nopad": 144}
# Kernels that may have more than one binary per tile over the token counts, with the reason.
VARIANTS = {
    "_grouped_product_kernel": 4,  # gate and up or down, of pairs that are sorted or not
    "_place_kernel": 2,  # few pairs are counted by the program that places them
}
# Kernels that move a few numbers each, by row: their load width says nothing.
NARROW = {
    ("triton.update_kv_index", "_update_kv_index_kernel"),
    ("triton.top_logprobs", "_merge_kernel"),
    ("triton.adjust_logits", "_edit_kernel"),
    ("triton.gather_columns", "_gather_columns_kernel"),
    ("triton.route_experts", "_route_kernel"),
    *((row.name, kernel) for row in NATIVE_ROWS for kernel in ("_count_kernel", "_place_kernel") if "fused_moe" in row.op),
}

# The least load in bits, by row, where it is not more than 16: a bias is 16 bits an output, a group's zero points are 8.
LEAST_BITS = {
    "triton.sample": 16,  # of the group that a draw fell to, a logit a thread
    "triton.w8a16_gemm": 16,
    "triton.w4a16_gemm": 8,
    "triton.fp8_gemm": 16,
    "triton.int8_gemm": 16,
    "triton.nvfp4_gemm": 16,
    "triton.mxfp4_gemm": 16,
    "triton.fused_moe_w4a16": 8,
    "triton.fused_moe_mxfp4": 8,  # an exponent of each 32
}

TOKEN_COUNTS = (1, 2, 3, 15, 16, 17, 31, 32, 48, 64)


def _skip_unless_served(row, device):
    if why_not := why_not_compiled(row, device):
        pytest.skip(f"{row.name} {why_not}")


@pytest.mark.case("D1")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@each_native_row
def test_a_row_compiles_over_its_sweep_and_fits_the_device(row, dtype, simulated, every, skip_unless_its_turn):
    _skip_unless_served(row, simulated)
    if dtype not in row.dtypes:
        pytest.skip(f"{row.name} does not serve {dtype}")
    if dtype != "bfloat16":  # what models run in is compiled for every device
        skip_unless_its_turn(("float16", "float32").index(dtype))

    record = compiled_sweep(row, simulated, dtype, every)

    assert record.launches
    record.check(max_spilled=SPILLED.get(row.name, MAX_SPILLED))
    for launch in record.launches:
        assert launch.cubin, launch.kernel
        assert simulated.native_fp8 or ".e4m3" not in launch.ptx, f"{launch.kernel} names e4m3 below sm89"
        assert store_load_hazards(launch.ttgir) == [], launch.kernel
        assert not launch.constexprs.get("PDL") or early_accesses(launch) == [], launch.kernel


@pytest.mark.case("C1")
@each_native_row
def test_a_count_compiles_one_binary_per_tile(row, simulated, skip_unless_its_turn):
    _skip_unless_served(row, simulated)
    skip_unless_its_turn(2)
    for count in counts_of(row):
        binaries = {}
        for tokens in TOKEN_COUNTS:
            for launch in compiled_call(row, simulated, "bfloat16", **{count: tokens}):
                tile = {name: value for name, value in launch.constexprs.items() if name.startswith("BLOCK")}
                key = (launch.kernel, launch.num_warps, launch.compiled.metadata.num_stages, *tile.items())
                binaries.setdefault(key, {}).setdefault(launch.variant, (tokens, launch.specialization, launch.constexprs))

        assert binaries
        several = {key: found for key, found in binaries.items() if len(found) > VARIANTS.get(key[0], 1)}
        assert not several, count + "\n".join(f"{key}: {list(found.values())}" for key, found in several.items())


@pytest.fixture
def heuristic_tiles(monkeypatch, tmp_path):
    """A searched tile may load less at a time where a launch is too small for bytes to count."""
    monkeypatch.setattr("rapid_llm.kernels.store.shipped_folder", lambda kind: tmp_path / kind)
    forget_tiles()
    yield
    forget_tiles()


@pytest.mark.case("C6")
@each_native_row
def test_a_row_loads_128_bits_at_a_time(row, simulated, heuristic_tiles, skip_unless_its_turn):
    _skip_unless_served(row, simulated)
    skip_unless_its_turn(0)
    for tokens in (1, 64):
        launches = compiled_call(row, simulated, "bfloat16", **{counts_of(row)[0]: tokens})
        assert launches
        for launch in launches:
            if (row.name, launch.kernel) not in NARROW:
                assert max(launch.load_bits) == 128, f"{launch.kernel}: {launch.load_bits}"
                assert min(launch.load_bits) >= LEAST_BITS.get(row.name, 32), (
                    f"{launch.kernel} loads single elements: {launch.load_bits}"
                )


@pytest.mark.case("B2")
@pytest.mark.parametrize("row", [row for row in NATIVE_ROWS if row.op.startswith("quantize_")], ids=lambda row: row.name)
@pytest.mark.parametrize("rows", [65_536, 4 * 16_385])
def test_rows_of_a_quantiser_stand_on_axis_0(row, rows, simulated):
    _skip_unless_served(row, simulated)
    groups = [{"group": 128}, {"group": 20_480}] if "group" in catalog().contract(row.op).defaults else [{}]
    for group in groups:
        for launch in compiled_call(row, simulated, "bfloat16", num_tokens=rows, k=20_480, **group):
            assert launch.grid[0] >= rows // 16
            assert max(launch.grid[1:]) <= 20_480 // 512  # tiles of k at most
