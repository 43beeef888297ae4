"""The search for tiles and the measurement of rows, with a clock that the test holds: what is wrong is never timed or stored."""

import dataclasses
import os

import pytest
import torch

from rapid_llm.entrypoints.cli import main
from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import current_device, device_info, known_devices
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.measure import tuner
from rapid_llm.kernels.measure.candidates import candidates
from rapid_llm.kernels.measure.serving import serving_sizes
from rapid_llm.kernels.measure.timer import COLD_BYTES, MAX_SETS, Timing, sets_for
from rapid_llm.kernels.measure.workloads import variants, workload
from rapid_llm.kernels.ops.tile_policy import (
    Tile,
    choose_tiles,
    fits,
    forget_tiles,
    kept_tiles,
    resolve_tiles,
    stored_sizes,
    tiled_ops,
    tiles_by,
)
from rapid_llm.kernels.provenance import is_installed
from rapid_llm.kernels.store import write_user_store

CPU = device_info("cpu")
SMALL = {"num_tokens": 3, "d": 512}
needs_interpreter = pytest.mark.skipif(
    not is_installed("triton") or os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(),
    reason="tries tiles in Triton's interpreter",
)


@pytest.fixture
def clock(monkeypatch):
    """Times by tile: the wider the tile, the faster, as far as ``fastest``."""
    seen = []

    def measure(calls, *, reset=None, budget_s=0.0, eager=False):
        tile = resolve_tiles("swiglu", device=CPU, dtype="float32", **SMALL)
        seen.append(tile)
        us = 10.0 if tile.BLOCK_N != 512 else 5.0 + tile.num_warps
        return Timing(us, us, us, 1, "graph", 0.0)

    monkeypatch.setattr(tuner, "measure", measure)
    return seen


@needs_interpreter
def test_the_fastest_tile_of_a_bucket_is_stored_and_served(clock):
    [found] = tuner.tune_op("swiglu", CPU, "float32", [SMALL])

    assert found.entry["bucket"] == "d=512,num_tokens=4"
    assert found.entry["tile"] == {"BLOCK_N": 512, "num_warps": 1, "num_stages": 1}
    assert found.tried == len(clock) > 1
    assert choose_tiles("swiglu", CPU, "float32", SMALL).source.startswith("heuristic")
    tuner.store_tiles(CPU, [found])
    choice = choose_tiles("swiglu", CPU, "float32", {"num_tokens": 4, "d": 300})
    assert (choice.source, choice.tile.num_warps) == ("store:user", 1)
    forget_tiles()


@needs_interpreter
def test_a_second_search_replaces_the_first_and_leaves_the_others(clock):
    tuner.store_tiles(CPU, list(tuner.tune_op("swiglu", CPU, "float32", [SMALL, {"num_tokens": 3, "d": 128}])))
    path = tuner.store_tiles(CPU, list(tuner.tune_op("swiglu", CPU, "float32", [SMALL])))
    assert path.read_text().count('"bucket"') == 2
    forget_tiles()


@needs_interpreter
def test_a_recheck_tries_the_kept_tile_beside_the_heuristics_even_if_the_kernel_was_edited(clock, monkeypatch):
    [found] = tuner.tune_op("swiglu", CPU, "float32", [SMALL])
    usual = choose_tiles("swiglu", CPU, "float32", SMALL).tile
    tuner.store_tiles(CPU, [dataclasses.replace(found, entry=found.entry | {"source_hash": "of yesterday"})])
    clock.clear()

    with pytest.warns(UserWarning, match="stale: tuned on source of yesterday"):
        [again] = tuner.tune_op("swiglu", CPU, "float32", [SMALL], recheck=True)

    assert clock == [usual, Tile(**found.entry["tile"])]
    assert (again.entry["tile"], again.entry["source_hash"]) == (found.entry["tile"], found.entry["source_hash"])
    clock.clear()
    list(tuner.tune_op("swiglu", CPU, "float32", [{"num_tokens": 300, "d": 512}], recheck=True))
    assert len(clock) > 2, "a bucket without a kept tile is searched"
    forget_tiles()


def test_a_malformed_entry_of_a_bucket_does_not_cost_a_recheck_the_others():
    entry = {"op": "swiglu", "dtype": "float32", "bucket": "d=512,num_tokens=4"}
    tiles = [{"BLOCK_N": 3}, None, {"BLOCK_N": 512, "num_warps": 2}]
    write_user_store("tuned", "cpu", [entry | {"tile": tile} for tile in tiles])
    assert kept_tiles("swiglu", "cpu", "float32", entry["bucket"]) == [Tile(BLOCK_N=512, num_warps=2)]
    forget_tiles()


@needs_interpreter
def test_a_tile_with_wrong_results_is_refused_before_it_is_timed(clock, monkeypatch):
    native = load_target(tuner.native_row("swiglu"))

    def broken(gate_up, *, out):
        native(gate_up, out=out)
        if resolve_tiles("swiglu", device=CPU, dtype="float32", **SMALL).num_warps == 1:
            out.add_(1.0)
        return out

    monkeypatch.setattr(tuner, "load_target", lambda row: broken if "triton" in row.name else load_target(row))
    [found] = tuner.tune_op("swiglu", CPU, "float32", [SMALL])
    assert found.entry["tile"]["num_warps"] != 1
    assert found.refused
    assert all("relative error" in text for text in found.refused)
    assert all(tile.num_warps != 1 for tile in clock)


@needs_interpreter
def test_a_gain_below_the_noise_keeps_the_heuristics_tile(monkeypatch):
    monkeypatch.setattr(tuner, "measure", lambda calls, **_: Timing(10.0, 10.0, 10.0, 1, "graph", 0.0))
    [found] = tuner.tune_op("swiglu", CPU, "float32", [SMALL])
    assert found.entry["tile"] == choose_tiles("swiglu", CPU, "float32", SMALL).tile.launch()


@pytest.mark.parametrize("op", tiled_ops())
@pytest.mark.parametrize("device", known_devices())
def test_every_candidate_fits_its_device_and_the_heuristic_comes_first(op, device):
    device = device_info(device)
    for sizes in serving_sizes(op):
        asked = {name: value for name, value in sizes.items() if name != "num_rows"}
        tiles = candidates(op, device, "bfloat16", asked)
        assert tiles[0] == choose_tiles(op, device, "bfloat16", asked).tile
        assert all(fits(op, tile, device, "bfloat16", asked) for tile in tiles[1:])
        assert len(tiles) == len(set(tiles)) <= 40


def test_candidates_hold_whole_groups_of_scales():
    tiles = candidates(
        "dense_gemm", device_info("h200"), "bfloat16", {"num_tokens": 16, "n": 4096, "k": 4096}, block_k_multiple=128
    )
    assert tiles
    assert all(tile.BLOCK_K % 128 == 0 for tile in tiles)


@pytest.mark.parametrize("op", sorted(catalog().contracts))
def test_every_ops_calls_run_and_cost_what_the_contract_says(op):
    contract = catalog().contract(op)
    row = next(row for row in catalog().rows[op] if row.fallback)
    sizes = {name: min(value, 320) for name, value in serving_sizes(op)[1].items()}
    if "num_heads" in sizes:
        sizes |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64} | ({"rotary_dim": 64} if "rotary_dim" in sizes else {})
    for variant in variants(op):
        call = workload(op, sizes, "float32", variant=variant, device="cpu", max_sets=2)
        function = load_target(row)
        expected = call.outputs(function)
        assert not call.difference(function, expected)
        broken = {name: (values.double() + 1).to(values.dtype) for name, values in expected.items()}
        assert call.difference(function, broken)
        assert call.difference(lambda **_: None, expected)  # what others left does not pass for its own
        for run in call.calls(function):
            run()
        assert len(call.sets) <= 2
    cost = contract.cost(sizes, 2)
    assert cost.read > 0
    assert cost.written > 0
    assert contract.cost(sizes, 4).written >= cost.written


def test_reading_and_writing_calls_find_their_tensors_as_they_were():
    call = workload("add_rms_norm", {"num_tokens": 3, "d": 64}, "float32", device="cpu", max_sets=2)
    before = [entry["residual"].clone() for entry in call.sets]
    function = load_target(next(row for row in catalog().rows["add_rms_norm"] if row.fallback))
    for run in call.calls(function):
        run()
    assert not torch.equal(call.sets[1]["residual"], before[1])
    assert not call.difference(function, call.outputs(function))  # whatever the runs before left
    for run in call.calls(function):
        run()
    call.reset()
    assert all(torch.equal(entry["residual"], values) for entry, values in zip(call.sets, before, strict=True))


def test_sets_amount_to_more_than_a_cache_unless_they_are_tiny():
    assert sets_for(COLD_BYTES // 8) == 8
    assert sets_for(COLD_BYTES * 3) == 1
    assert sets_for(100) == MAX_SETS


def test_large_token_counts_have_buckets_of_their_own():
    tiles = {tokens: choose_tiles("dense_gemm", device_info("h200"), "bfloat16", {"num_tokens": tokens, "n": 4096, "k": 4096})
             for tokens in (64, 4096)}  # fmt: skip
    assert tiles[64] != tiles[4096]


def test_trials_end_with_their_block_and_an_unknown_op_is_refused():
    tile = Tile(BLOCK_N=128, num_warps=1)
    with tiles_by(lambda op, dtype, sizes: tile):
        assert resolve_tiles("swiglu", device=CPU, dtype="float32", **SMALL) is tile
    assert resolve_tiles("swiglu", device=CPU, dtype="float32", **SMALL) is not tile
    with pytest.raises(ConfigError, match="no tiles to search"):
        tuner.tunable(["update_kv_buffer"])


@pytest.mark.case("D1")
def test_the_tiles_of_prefill_are_those_of_its_triton_row():
    """The Gluon row has one tile, and its module takes none."""
    assert tuner.native_row("flashattention2_nopad").name == "triton.flashattention2_nopad"


def test_a_stored_tile_too_large_for_the_card_is_ignored_with_a_warning():
    device, sizes = device_info("rtx5090"), {"num_tokens": 4096, "n": 4096, "k": 4096}
    usual = choose_tiles("dense_gemm", device, "bfloat16", sizes, any_triton=True)
    row = tuner.native_row("dense_gemm")
    entry = {
        "op": "dense_gemm",
        "bucket": "k=4096,n=4096,num_tokens=4096",
        "dtype": "bfloat16",
        "target": row.target,
        "source_hash": tuner.source_hash(row.target),
        "triton": "3.6",
        "tile": dataclasses.asdict(Tile(128, 256, 64, num_warps=8, num_stages=4)),
    }
    tuner.store_tiles(device, [tuner.Tuned(entry, 1)])
    with pytest.warns(UserWarning, match="too large for the shared memory of rtx5090"):
        assert choose_tiles("dense_gemm", device, "bfloat16", sizes, any_triton=True) == usual
    forget_tiles()


@needs_interpreter
def test_the_command_verifies_searches_measures_and_keeps_all_of_it(monkeypatch, capsys):
    """On this machine's own device, with a clock of one microsecond."""
    here = current_device(None)
    monkeypatch.setattr("rapid_llm.entrypoints.kernels_cli.probe_device", lambda: dataclasses.replace(here, type="cuda"))
    monkeypatch.setattr("rapid_llm.entrypoints.kernels_cli._compile_first", lambda *_: None)
    verified = []
    monkeypatch.setattr("rapid_llm.kernels.verify.runner.verify", lambda ops, device: verified.extend(ops) or [])
    monkeypatch.setattr(tuner, "measure", lambda calls, **_: Timing(1.0, 1.0, 1.0, 1, "graph", 0.0))
    monkeypatch.setattr(tuner, "tuning_sizes", lambda op: [SMALL])
    monkeypatch.setattr("rapid_llm.kernels.measure.serving.serving_sizes", lambda op: [SMALL])
    monkeypatch.setattr(tuner, "workload", lambda *args, device, **kwargs: workload(*args, device="cpu", **kwargs))
    monkeypatch.setattr("rapid_llm.kernels.ops.activation.swiglu.launch_device", lambda tensor: here)

    assert main(["kernels", "tune", "--op", "swiglu", "--dtype", "fp32"]) == 0

    printed = capsys.readouterr().out
    assert verified == ["swiglu"]
    assert "1 of 1, about 0 s left: swiglu d=512,num_tokens=4: BLOCK_N=" in printed
    assert "1 buckets of swiglu in " in printed
    forget_tiles()


@needs_interpreter
def test_a_search_that_is_stopped_has_stored_what_it_had_found(clock, monkeypatch):
    [found] = tuner.tune_op("swiglu", CPU, "float32", [SMALL])
    here = current_device(None)
    monkeypatch.setattr("rapid_llm.entrypoints.kernels_cli.probe_device", lambda: dataclasses.replace(here, type="cuda"))
    monkeypatch.setattr("rapid_llm.entrypoints.kernels_cli._compile_first", lambda *_: None)
    monkeypatch.setattr(tuner, "is_verified_here", lambda *_: True)

    def stopped(*_, **__):
        yield found
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "tune_op", stopped)
    monkeypatch.setattr(tuner, "count_buckets", lambda *_: 2)

    assert main(["kernels", "tune", "--op", "swiglu", "--dtype", "fp32", "--only", "tiles"])

    assert kept_tiles("swiglu", here.name, "float32", "d=512,num_tokens=4")
    forget_tiles()


def test_a_search_of_an_op_without_tiles_is_refused_and_not_passed_over(monkeypatch, capsys):
    gpu = dataclasses.replace(current_device(None), type="cuda")
    monkeypatch.setattr("rapid_llm.entrypoints.kernels_cli.probe_device", lambda: gpu)
    assert main(["kernels", "tune", "--op", "update_kv_buffer", "--only", "tiles"]) == 2
    assert "no tiles to search" in capsys.readouterr().err


def test_the_command_asks_for_a_gpu(capsys):
    if current_device(None).type == "cpu":
        assert main(["kernels", "tune"]) == 2
        assert "tiles are searched on a GPU" in capsys.readouterr().err


@needs_interpreter
@pytest.mark.parametrize("op", tuner.tunable(None))
def test_a_stored_tile_is_found_by_the_sizes_that_its_row_asks_with_and_by_those_of_its_contract(op):
    """The launch and ``explain`` must speak of one tile."""
    contract = catalog().contract(op)
    sizes = {
        **contract.defaults,
        **{name: 64 for name in ("n", "k", "d", "vocab_size") if name in contract.defaults},
        **{name: 256 for name in ("hidden_size",) if name in contract.defaults},  # whole groups of experts
    }
    if "k" in sizes or "d" in sizes:
        sizes |= {name: 64 for name in ("group",) if name in sizes}
    sizes |= {name: min(sizes[name], 128) for name in ("q_len", "kv_len") if name in sizes}
    asked = tuner._sizes_asked(op, load_target(tuner.native_row(op)), CPU, "float32", sizes)
    assert stored_sizes(op, asked) == stored_sizes(op, sizes)
    assert set(asked) <= set(stored_sizes(op, sizes))


def test_rows_of_attention_are_measured_on_tables_as_wide_as_an_engines():
    sizes = {"num_seqs": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "page_size": 16, "q_len": 1, "kv_len": 40}
    call = workload("flash_decoding", sizes, "float32", device="cpu", max_sets=2)
    row = load_target(tuner.fallback_row("flash_decoding"))
    expected = {name: values.clone() for name, values in call.outputs(row).items()}

    wide = tuner.with_whole_contexts(call)

    assert {tuple(arguments["page_table"].shape) for arguments in wide.sets} == {(2, 131_072 // 16)}
    assert wide.difference(row, expected) == ""
    assert tuner.with_whole_contexts(norm := workload("rms_norm", {"num_tokens": 2, "d": 64}, "float32", device="cpu")) is norm
