"""Tiles: the stores first, then a heuristic that fits its device."""

import itertools

import pytest

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import device_info, known_devices
from rapid_llm.kernels.ops import tile_policy
from rapid_llm.kernels.ops.tile_policy import (
    Tile,
    TileTier,
    choose_tiles,
    forget_tiles,
    resolve_tiles,
    shape_bucket,
    tile_tier,
    tiled_ops,
)
from rapid_llm.kernels.provenance import source_hash
from rapid_llm.kernels.store import StoreWarning, write_user_store

H200, A100, RTX3090 = device_info("h200"), device_info("a100"), device_info("rtx3090")
GEMM = {"num_tokens": 512, "n": 4096, "k": 4096}
MOE = {"num_tokens": 512, "num_experts": 128, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768}
SIZES = {
    "swiglu": {"num_tokens": 7, "d": 14336},
    "rms_norm": {"num_tokens": 7, "d": 4096},
    "add_rms_norm": {"num_tokens": 7, "d": 4096},
    "gather_columns": {"num_tokens": 7, "k": 4096},
    "vocab_embedding": {"num_tokens": 7, "hidden_size": 4096, "vocab_size": 128256},
    "rope": {"num_tokens": 7, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rotary_dim": 128},
    "rope_kv_write": {"num_tokens": 7, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "qk_norm_rope_kv_write": {"num_tokens": 7, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
    "sample": {"num_seqs": 64, "vocab_size": 151_936},
    "top_logprobs": {"num_seqs": 64, "vocab_size": 151_936},
    "dense_gemm": GEMM,
    "w8a16_gemm": {**GEMM, "group": 4096},
    "w4a16_gemm": {**GEMM, "group": 128},
    "quantize_fp8": {"num_tokens": 7, "k": 4096, "group": 4096},
    "fp8_gemm": {**GEMM, "group": 128},
    "add_rms_norm_fp8": {"num_tokens": 7, "d": 4096, "group": 128},
    "swiglu_fp8": {"num_tokens": 7, "d": 14336, "group": 14336},
    "quantize_int8": {"num_tokens": 7, "k": 4096},
    "int8_gemm": GEMM,
    "nvfp4_gemm": GEMM,
    "mxfp4_gemm": GEMM,
    "quantize_nvfp4": {"num_tokens": 7, "k": 4096},
    **dict.fromkeys(("fused_moe", "fused_moe_mxfp4"), MOE),
    **{op: {**MOE, "group": 128} for op in ("fused_moe_fp8", "fused_moe_w8a16", "fused_moe_w4a16")},
    "flashattention2_nopad": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "q_len": 512},
    "flash_decoding": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16},
    "flashattention2_nopad_fp8": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "q_len": 512},
    "flash_decoding_fp8": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16},
}


def test_launch_leaves_out_the_axes_that_are_none():
    assert Tile(BLOCK_N=64, num_warps=2).launch() == {"BLOCK_N": 64, "num_warps": 2, "num_stages": 1}


@pytest.mark.parametrize("knobs", [{"BLOCK_N": 48}, {"BLOCK_M": 0}, {"num_warps": 3}, {"num_stages": 0}, {"BLOCK_K": "64"}])
def test_a_tile_that_triton_cannot_launch_is_refused(knobs):
    with pytest.raises(ConfigError, match=next(iter(knobs))):
        Tile(**knobs)


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        ("h200", "HOPPER_UP"),
        ("h100", "HOPPER_UP"),
        ("b200", "HOPPER_UP"),
        ("a100", "PRE_HOPPER"),
        ("rtx3090", "PRE_HOPPER"),
        ("l40s", "PRE_HOPPER"),
        ("rtx4090", "PRE_HOPPER"),
        ("rtx5090", "PRE_HOPPER"),
        ("t4", "PRE_HOPPER"),
        ("cpu", "PRE_HOPPER"),
    ],
)
def test_a_tier_is_chosen_by_shared_memory_and_features(name, tier):
    assert tile_tier(device_info(name)) is TileTier[tier]


def test_sm120_gets_the_tiles_of_sm86_not_those_of_sm90():
    assert resolve_tiles("dense_gemm", device=device_info("rtx5090"), dtype="bfloat16", **GEMM) == resolve_tiles(
        "dense_gemm", device=RTX3090, dtype="bfloat16", **GEMM
    )


def test_the_a100_gets_narrow_tiles_and_more_stages_than_sm86():
    a100, rtx3090 = (resolve_tiles("dense_gemm", device=device, dtype="bfloat16", **GEMM) for device in (A100, RTX3090))

    assert (a100.BLOCK_M, a100.BLOCK_N, a100.BLOCK_K) == (rtx3090.BLOCK_M, rtx3090.BLOCK_N, rtx3090.BLOCK_K)
    assert (a100.num_stages, rtx3090.num_stages) == (5, 3)


@pytest.mark.case("D1")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", known_devices())
def test_every_matrix_tile_fits_its_device(name, dtype):
    device = device_info(name)
    itemsize = 4 if dtype == "float32" else 2
    for tokens, n, k, multiple in itertools.product(
        (0, 1, 16, 64, 256, 8192), (1, 576, 151_936), (1, 64, 4096), (1, 16, 128, 256)
    ):
        tile = resolve_tiles("dense_gemm", device=device, dtype=dtype, num_tokens=tokens, n=n, k=k, block_k_multiple=multiple)

        assert tile.BLOCK_K % multiple == 0
        if tile.BLOCK_M == 1:  # one token's product keeps nothing in shared memory
            assert tokens <= 1
            continue
        used = (tile.BLOCK_M + tile.BLOCK_N) * tile.BLOCK_K * itemsize * tile.num_stages
        assert used <= (device.smem or 65_536)
        assert tile.num_stages >= 2
        assert min(tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K) >= 16


@pytest.mark.case("D1")
@pytest.mark.parametrize("op", ["flashattention2_nopad", "flash_decoding"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", known_devices())
def test_every_attention_tile_fits_its_device(name, dtype, op):
    device = device_info(name)
    itemsize = 4 if dtype == "float32" else 2
    for head_dim, (num_heads, num_kv_heads) in itertools.product((64, 80, 128, 256), ((8, 8), (32, 8), (64, 1))):
        for length in (1, 16, 64, 8192):
            sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": 16}
            tile = resolve_tiles(op, device=device, dtype=dtype, q_len=length, **sizes)

            row_bytes = (1 << (head_dim - 1).bit_length()) * itemsize
            used = (tile.BLOCK_M + 2 * tile.BLOCK_N * tile.num_stages) * row_bytes
            assert used <= (device.smem or 65_536)
            assert min(tile.BLOCK_M, tile.BLOCK_N) >= 16


@pytest.mark.case("D1")
@pytest.mark.parametrize("op", ["flashattention2_nopad_fp8", "flash_decoding_fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", known_devices())
def test_every_tile_over_e4m3_fits_its_device_with_its_keys_as_numbers(name, dtype, op):
    device = device_info(name)
    itemsize = 4 if dtype == "float32" else 2
    for head_dim, (num_heads, num_kv_heads) in itertools.product((64, 128, 256), ((8, 8), (32, 8), (64, 1))):
        for length in (1, 64, 8192):
            sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": 16}
            tile = resolve_tiles(op, device=device, dtype=dtype, q_len=length, **sizes)
            used = tile.BLOCK_M * itemsize + 2 * tile.BLOCK_N * (tile.num_stages + itemsize)
            assert used * head_dim <= (device.smem or 65_536)


def test_one_token_is_multiplied_without_matrix_instructions_unless_its_weights_are_grouped():
    sizes = {"num_tokens": 1, "n": 4096, "k": 4096}
    assert resolve_tiles("dense_gemm", device=H200, dtype="bfloat16", **sizes).BLOCK_M == 1
    assert resolve_tiles("dense_gemm", device=H200, dtype="bfloat16", block_k_multiple=128, **sizes).BLOCK_M == 16
    assert resolve_tiles("dense_gemm", device=H200, dtype="bfloat16", **{**sizes, "num_tokens": 2}).BLOCK_M == 8


@pytest.mark.case("D1")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", ["w8a16_gemm", "w4a16_gemm"])
@pytest.mark.parametrize("name", known_devices())
def test_every_weight_only_tile_holds_whole_groups_and_fits_its_device(name, op, dtype):
    device = device_info(name)
    for tokens, n, k, group in itertools.product((0, 1, 64, 8192), (1, 4096), (2048, 3960), (16, 128, 1024, 3960)):
        sizes = {"num_tokens": tokens, "n": n, "k": k, "group": min(group, k)}
        multiple = 1 if group >= k else group
        tile = resolve_tiles(op, device=device, dtype=dtype, block_k_multiple=multiple, **sizes)

        assert tile.BLOCK_K % multiple == 0
        assert tile_policy.fits(op, tile, device, dtype, sizes)
        assert tile.BLOCK_M == 1 or min(tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K) >= 16
        assert tile == resolve_tiles(op, device=device, dtype=dtype, **sizes)  # what is explained and searched


@pytest.mark.case("D1")
@pytest.mark.parametrize("op", ["fp8_gemm", "int8_gemm"])
@pytest.mark.parametrize("name", known_devices())
def test_every_tile_of_bytes_fits_its_device_in_two_stages_and_never_cuts_across_a_group(name, op):
    device = device_info(name)
    for tokens, n, k in itertools.product((0, 1, 17, 64, 256, 8192), (1, 576, 151_936), (1, 64, 3960)):
        for group in (k, 128) if op == "fp8_gemm" and k > 128 else (None,):
            sizes = {"num_tokens": tokens, "n": n, "k": k} | ({} if group is None else {"group": group})
            tile = resolve_tiles(op, device=device, dtype="bfloat16", **sizes)
            assert tile_policy.fits(op, tile, device, "bfloat16", sizes)
            assert tile.num_stages >= 2
            assert min(tile.BLOCK_M, tile.BLOCK_N) >= 16
            assert tile.BLOCK_K >= 32
            assert tile.BLOCK_K == 128 or group != 128


@pytest.mark.case("D1")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("op", "group"), [("nvfp4_gemm", 16), ("mxfp4_gemm", 32)])
@pytest.mark.parametrize("name", known_devices())
def test_every_tile_of_4_bit_floats_holds_whole_groups_and_fits_its_device(name, op, group, dtype):
    device = device_info(name)
    for tokens, n, k in itertools.product((0, 1, 16, 64, 8192), (1, 8, 4096, 14_336), (32, 96, 4096)):
        sizes = {"num_tokens": tokens, "n": n, "k": k}
        tile = resolve_tiles(op, device=device, dtype=dtype, block_k_multiple=group, **sizes)

        assert tile.BLOCK_K % group == 0
        assert tile_policy.fits(op, tile, device, dtype, sizes)
        if tile.BLOCK_M != 1:
            assert min(tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K) >= 16
            assert tile.num_stages >= 2
        assert tile == resolve_tiles(op, device=device, dtype=dtype, **sizes)  # what is explained and searched


@pytest.mark.case("D1")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", [op for op in SIZES if op.startswith("fused_moe")])
@pytest.mark.parametrize("name", known_devices())
def test_every_tile_of_experts_fits_its_device_and_has_the_rows_that_an_expert_may_expect(name, op, dtype):
    device = device_info(name)
    for tokens, experts, width in itertools.product((0, 1, 64, 512, 16_384), (4, 128, 512), (32, 768, 14_336)):
        sizes = {**SIZES[op], "num_tokens": tokens, "num_experts": experts, "intermediate_size": width}
        tile = resolve_tiles(op, device=device, dtype=dtype, **sizes)

        assert tile_policy.fits(op, tile, device, dtype, sizes)
        assert min(tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K) >= 16
        assert max(2 * tokens * 8 / experts, 16) >= tile.BLOCK_M


def test_a_decode_tile_does_not_change_with_the_batch():
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}
    tiles = {resolve_tiles("flash_decoding", device=H200, dtype="bfloat16", num_seqs=n, **sizes) for n in (1, 7, 64, 4096)}
    assert len(tiles) == 1


@pytest.mark.parametrize("name", ["cpu", "rtx3090", "h200"])
@pytest.mark.parametrize("op", sorted(SIZES))
def test_every_op_has_a_tile_on_every_tier(op, name):
    tile = resolve_tiles(op, device=device_info(name), dtype="bfloat16", **SIZES[op])

    assert tile.BLOCK_N >= 16
    assert 1 <= tile.num_warps <= 16


def test_the_ops_with_tiles_are_those_tested_here():
    assert sorted(tiled_ops()) == sorted(SIZES)


@pytest.mark.parametrize(("d", "width"), [(1, 16), (64, 64), (1000, 1024), (1025, 2048), (8192, 8192), (65_536, 8192)])
def test_a_norm_covers_its_row_up_to_what_registers_hold(d, width):
    launch = resolve_tiles("rms_norm", device=RTX3090, dtype="float32", d=d).launch()

    assert launch["BLOCK_N"] == width


def test_shapes_of_one_bucket_get_one_tile_so_that_they_compile_once():
    tiles = {
        resolve_tiles("dense_gemm", device=H200, dtype="bfloat16", num_tokens=tokens, n=4096, k=4096)
        for tokens in range(129, 257)
    }

    assert len(tiles) == 1
    assert shape_bucket({"num_tokens": 129, "d": 0}) == shape_bucket({"d": 0, "num_tokens": 256}) == "d=0,num_tokens=256"


def test_a_torch_dtype_serves_as_well_as_its_name():
    import torch

    assert resolve_tiles("swiglu", device=H200, dtype=torch.bfloat16, d=64) == resolve_tiles(
        "swiglu", device=H200, dtype="bfloat16", d=64
    )


def test_without_a_device_the_current_one_is_taken(monkeypatch):
    monkeypatch.setattr(tile_policy, "current_device", lambda kind: H200)

    assert resolve_tiles("dense_gemm", dtype="bfloat16", **GEMM) == resolve_tiles(
        "dense_gemm", device=H200, dtype="bfloat16", **GEMM
    )


@pytest.mark.parametrize(
    ("op", "arguments", "told"),
    [
        pytest.param("swigluu", {"d": 8}, "perhaps 'swiglu'", id="unknown-op"),
        pytest.param("swiglu", {"n": 8}, "unknown size of swiglu: got n", id="unknown-size"),
        pytest.param("swiglu", {"num_tokens": 8}, "missing.*wanted d", id="missing-size"),
        pytest.param("swiglu", {"d": 8, "dtype": "float8"}, "float8", id="unknown-dtype"),
        pytest.param("swiglu", {"d": 8, "block_k_multiple": 16}, "no BLOCK_K", id="grouped-op-without-k"),
        pytest.param("dense_gemm", {**GEMM, "block_k_multiple": 0}, "1 or more", id="multiple-of-zero"),
        pytest.param("dense_gemm", {**GEMM, "block_k_multiple": 48}, "wanted a power of two", id="groups-no-block-covers"),
        pytest.param("dense_gemm", {**GEMM, "block_k_multiple": 4096}, "smaller groups", id="groups-past-shared-memory"),
    ],
)
def test_what_cannot_be_resolved_is_refused(op, arguments, told):
    with pytest.raises(ConfigError, match=told):
        resolve_tiles(op, device=RTX3090, **{"dtype": "bfloat16", **arguments})


@pytest.mark.parametrize(("multiple", "k"), [(16, 4096), (32, 16), (128, 4096), (256, 4096), (256, 64)])
def test_block_k_is_a_multiple_of_the_groups_grown_where_needed(multiple, k):
    tile = resolve_tiles("dense_gemm", device=RTX3090, dtype="bfloat16", num_tokens=512, n=4096, k=k, block_k_multiple=multiple)

    assert tile.BLOCK_K % multiple == 0


# ---- stores

TUNED = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 2, "num_stages": 4}


@pytest.fixture
def tuned(world, monkeypatch):
    """Writes the user's store of the h200 with one entry; Triton 3.6 is installed."""
    monkeypatch.setattr(tile_policy, "triton_minor_here", lambda: "3.6")
    target = world.module("kernel_gemm")

    def write(**fields):
        entry = {"op": "dense_gemm", "bucket": shape_bucket(GEMM), "dtype": "bfloat16", "target": target}
        entry |= {"source_hash": source_hash(target), "triton": "3.6", "tile": TUNED}
        write_user_store("tuned", "h200", [{**entry, **fields}])
        forget_tiles()

    return write


def _choose(**arguments):
    return choose_tiles("dense_gemm", H200, "bfloat16", GEMM, **arguments)


def test_a_stored_tile_comes_before_the_heuristic(tuned):
    assert _choose().source == "heuristic:HOPPER_UP"

    tuned()

    assert _choose().source == "store:user"
    assert _choose().tile == Tile(**TUNED)


def test_the_users_store_comes_before_the_shipped_one(tuned, monkeypatch, tmp_path, world):
    tuned()
    user = tmp_path / "data" / "tuned" / "h200.json"
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "h200.json").write_text(
        user.read_text().replace('"num_warps": 2', '"num_warps": 8'), encoding="utf-8"
    )
    monkeypatch.setattr("rapid_llm.kernels.store.shipped_folder", lambda kind: tmp_path / "shipped")

    assert (_choose().source, _choose().tile.num_warps) == ("store:user", 2)
    user.unlink()
    forget_tiles()
    assert (_choose().source, _choose().tile.num_warps) == ("store:shipped", 8)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"op": "swiglu"}, id="op"),
        pytest.param({"dtype": "float16"}, id="dtype"),
        pytest.param({"bucket": "k=4096,n=4096,num_tokens=1024"}, id="bucket"),
    ],
)
def test_an_entry_for_another_question_is_not_taken(fields, tuned):
    tuned(**fields)

    assert _choose().source == "heuristic:HOPPER_UP"


def test_an_entry_of_another_device_is_not_taken(tuned):
    tuned()

    assert choose_tiles("dense_gemm", RTX3090, "bfloat16", GEMM).source == "heuristic:PRE_HOPPER"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        pytest.param({"source_hash": "f" * 64}, "stale: tuned on source ffffffffffff", id="changed-source"),
        pytest.param({"triton": "3.9"}, "stale: tuned with Triton 3.9, 3.6 is installed", id="another-triton"),
        pytest.param({"tile": {**TUNED, "BLOCK_M": 33}}, "malformed", id="no-power-of-two"),
        pytest.param({"tile": {**TUNED, "waves": 2}}, "malformed", id="unknown-knob"),
        pytest.param({"tile": None}, "malformed", id="no-tile"),
        pytest.param({"target": "no_such_module:f"}, "malformed", id="kernel-gone"),
    ],
)
def test_a_stale_or_malformed_entry_costs_one_warning_that_names_the_file(fields, told, tuned):
    tuned(**fields)

    with pytest.warns(StoreWarning, match=told) as caught:
        assert _choose().source == "heuristic:HOPPER_UP"
    forget_tiles()
    assert _choose().source == "heuristic:HOPPER_UP"  # pytest makes a second warning an error

    assert len(caught) == 1
    assert "h200.json" in str(caught[0].message)


def test_a_stored_tile_that_would_cut_a_group_is_refused(tuned):
    tuned()

    assert _choose(block_k_multiple=32).source == "store:user"
    assert _choose(block_k_multiple=64).source == "heuristic:HOPPER_UP"
    assert _choose(block_k_multiple=64).tile.BLOCK_K % 64 == 0


def test_a_device_of_another_machine_takes_tiles_of_any_triton(tuned):
    tuned(triton="3.9")

    assert _choose(any_triton=True).source == "store:user"
