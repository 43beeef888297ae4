"""The frame of the kernel benches, on the CPU: a made-up clock, real checks."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import record
from benchmarks.kernels import bench_kv_write, bench_sampling, kv_pool, microbench
from benchmarks.kernels.all import BENCHES
from benchmarks.kernels.cells import Cell, Skipped, few
from benchmarks.kernels.microbench import Bench, Session, parser
from benchmarks.kernels.peers import (
    attention_sizes,
    best_peer,
    our_cell,
    peers_of,
    recorded_cell,
    recorded_cells,
    their_case,
)
from benchmarks.kernels.tune_tiles import write_joined
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.measure.ceilings import Ceilings
from rapid_llm.kernels.measure.timer import Timing
from rapid_llm.kernels.provenance import source_hash

FIELDS = {
    "run", "bench", "op", "cell", "variant", "dtype", "arm", "us", "least_us", "most_us", "runs", "method", "first_call_s",
    "read_bytes", "written_bytes", "flops", "floor_us", "ratio", "node_us", "above_ceiling", "cold", "problem", "skipped",
    "date", "command", "commit", "machine", "versions", "best_peer", "best_peer_us",
}  # fmt: skip
CEILINGS = Ceilings(read_gbps=4000.0, copy_gbps=4000.0, tflops=800.0, node_us=1.0)
SMALL = Cell("swiglu", {"num_tokens": 4, "d": 64})


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Every call takes ``clock["us"]``; ``clock["timed"]`` counts. Lines go to a folder of the test's."""
    state = {"us": 5.0, "timed": 0}

    def measure(calls, *, reset=None, budget_s=0.0, eager=False):
        state["timed"] += 1
        calls[0]()
        if reset:
            reset()
        return Timing(state["us"], state["us"] - 1, state["us"] + 1, 7, "graph", 0.1)

    monkeypatch.setattr(microbench, "measure", measure)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    state["file"] = tmp_path / "kernels_cpu.jsonl"
    return state


def session(*flags):
    return Session(parser("").parse_args(list(flags)), "cpu", CEILINGS)


def silu_up(each):
    gate, up = each["gate_up"].chunk(2, -1)
    return torch.nn.functional.silu(gate.float()) * up


def bench_of(peer, *cells, name="one"):
    return Bench("test", cells or (SMALL,), peers={"swiglu": {name: peer}})


def right(cell, work):
    return [lambda each=each: silu_up(each) for each in work.sets]


def run(bench, *flags):
    return {line["arm"]: line for line in session(*flags).run(bench)}


def test_an_arm_that_differs_prints_no_time_and_says_what_differs(clock, capsys):
    line = run(bench_of(lambda cell, work: [lambda: silu_up(work.sets[0]) * 1.1]), "--only", "peer")["peer:one"]
    assert line["us"] is None
    assert "relative error" in line["problem"]
    assert clock["timed"] == 0
    assert " us (" not in capsys.readouterr().out


def test_an_arm_that_writes_nothing_does_not_pass_on_what_another_wrote(clock):
    class Idle:
        """Gives back the out tensor as it finds it."""

        def __init__(self, work):
            self.work = work

        def __call__(self):
            return self.work.sets[0]["out"]

    line = run(bench_of(lambda cell, work: [Idle(work)]))["peer:one"]
    assert line["us"] is None
    assert line["problem"]


def test_an_arm_that_raises_is_recorded_and_the_run_goes_on(clock):
    def broken(cell, work):
        raise ValueError("no such\n  size")

    lines = run(Bench("test", (SMALL,), peers={"swiglu": {"bad": broken, "good": right}}))
    assert lines["peer:bad"]["problem"] == "ValueError: no such size"
    assert lines["peer:good"]["us"] == 5.0
    assert lines["torch.swiglu"]["us"] == 5.0
    assert "device" in lines["triton.swiglu"]["skipped"]


def test_a_workload_that_cannot_be_made_costs_its_cell_only(clock):
    def build(cell, device):
        if cell.sizes["num_tokens"] == 4:
            raise MemoryError("too large")
        return microbench.build(cell, device)

    other = Cell("swiglu", {"num_tokens": 2, "d": 64})
    lines = session("--only", "torch.").run(Bench("test", (SMALL, other), build=build))
    assert [(line["arm"], line["problem"]) for line in lines] == [
        ("*", "no workload: MemoryError: too large"),
        ("torch.swiglu", ""),
    ]


@pytest.mark.parametrize(("share", "above"), [(0.9, True), (0.98, False), (3.0, False)])
def test_a_time_below_the_floor_is_flagged(clock, share, above):
    clock["us"] = share * CEILINGS.floor_us(SMALL.cost, SMALL.itemsize)
    assert run(bench_of(right))["peer:one"]["above_ceiling"] is above


def test_a_line_has_every_field_and_its_ratio_is_to_the_node_where_that_is_the_floor(clock):
    lines = run(bench_of(right))
    written = [json.loads(text) for text in clock["file"].read_text().splitlines()]
    assert all(set(line) == FIELDS for line in written)
    assert len(written) == len(lines)
    line = lines["torch.swiglu"]
    assert line["ratio"] == 5.0  # a node takes 1 us, the bytes less
    assert (line["cell"], line["cold"]) == ({"num_tokens": 4, "d": 64}, "in cache, 64 sets of 1.54 kB")
    assert line["first_call_s"] > 0


def test_a_reason_to_skip_is_recorded_once(clock):
    def missing(cell, work):
        raise Skipped("import nothing: ModuleNotFoundError")

    other = Cell("swiglu", {"num_tokens": 2, "d": 64})
    lines = session("--only", "peer").run(bench_of(missing, SMALL, other))
    assert [line["skipped"] for line in lines] == ["import nothing: ModuleNotFoundError"]


def test_the_limit_leaves_cells_out_by_name(clock, capsys):
    now = session("--limit", "0")
    assert now.run(bench_of(right)) == []
    assert now.left == [SMALL]
    assert str(SMALL) in capsys.readouterr().out


def test_flags_pick_ops_and_arms(clock):
    assert session("--op", "rope").run(bench_of(right)) == []
    assert set(run(bench_of(right), "--only", "torch", "--skip", "peer")) == {"torch.swiglu"}
    assert len(few([SMALL] * 9)) == 2


@given(ours=st.floats(0.1, 1e4), floor=st.floats(0.01, 1e4), us=st.floats(0.1, 1e4), old_floor=st.floats(0.01, 1e4))
def test_the_best_peer_is_the_smaller_of_this_run_and_of_the_scaled_record(ours, floor, us, old_floor):
    entry = {"arm": "liger", "us": us, "floor_us": old_floor}
    best = best_peer(SMALL, {"peer:torch_eager": ours, "triton.swiglu": 0.001}, floor, entry)
    scaled = us * floor / old_floor
    assert best.us == min(ours, scaled)
    assert best.text.startswith("torch_eager in this run" if ours <= scaled else "liger recorded")
    assert ("not in this run" in best.text) == (ours > scaled)


def test_a_recorded_arm_that_ran_is_not_called_missing_and_cublas_is_our_row():
    entry = {"arm": "torch_cublas", "us": 10.0, "floor_us": 5.0}
    cell = Cell("dense_gemm", {"num_tokens": 1, "n": 64, "k": 64})
    assert "not in this run" not in best_peer(cell, {"cublas.dense_gemm": 30.0}, 5.0, entry).text
    assert best_peer(cell, {"cublas.dense_gemm": 3.0}, 5.0, entry).text == "torch_cublas in this run"
    assert best_peer(cell, {"triton.dense_gemm": 3.0}, 5.0) is None


@pytest.mark.parametrize("cell", recorded_cells(), ids=str)
def test_every_recorded_cell_is_known_to_its_contract_and_in_a_sweep(cell):
    entry = recorded_cell(cell)
    assert cell.cost.read > 0
    assert cell in [each for bench in BENCHES for each in bench.cells]
    assert entry["us"] > 0.9 * entry["floor_us"]
    op, case = their_case(cell)
    again = our_cell(op, case)
    assert (again.op, dict(again.sizes), again.variant) == (cell.op, dict(cell.sizes), cell.variant)


def test_every_swept_cell_is_known_to_its_contract_and_swept_once():
    cells = [str(cell) for bench in BENCHES for cell in bench.cells]
    assert len(cells) == len(set(cells))
    assert all(cell.cost.read + cell.cost.written for bench in BENCHES for cell in bench.cells)


def test_a_factory_of_a_folder_of_peers_gets_our_numbers_under_its_names(clock):
    def swiglu(case, sets):
        assert case == {"tokens": 4, "ffn": 64}
        return [lambda s=s: silu_up({"gate_up": s["x"]}) for s in sets]

    peers = peers_of({"swiglu": {"theirs": swiglu, "torch_compile": swiglu}}, SMALL, compiled=False)
    assert list(peers) == ["theirs"]
    assert run(Bench("test", (SMALL,), peers={"swiglu": peers}))["peer:theirs"]["us"] == 5.0


@pytest.mark.parametrize(
    "cell",
    [
        Cell("flash_decoding", attention_sizes(4, 2, 128, 3, 1, 32)),
        Cell("flashattention2_nopad", attention_sizes(4, 2, 128, 2, 32, 32)),
        Cell("flashattention2_nopad", attention_sizes(4, 2, 128, 2, 16, 48)),
        Cell("update_kv_buffer", {"num_tokens": 5, "num_kv_heads": 2, "head_dim": 128, "num_rows": 64}, variant="scattered"),
        Cell("dense_gemm", {"num_tokens": 3, "n": 32, "k": 64}),
        Cell("rope", {"num_tokens": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "rotary_dim": 128}),
        Cell("add_rms_norm", {"num_tokens": 3, "d": 64}),
    ],
    ids=str,
)
def test_their_sets_hold_what_their_factories_expect(cell):
    bench = next(bench for bench in BENCHES if any(each.op == cell.op for each in bench.cells))
    op, _ = their_case(cell)
    seen = []

    def factory(case, sets):
        seen.extend(sets)
        return [lambda: None]

    work = bench.build(cell, "cpu")
    peers_of({op: {"theirs": factory}}, cell, compiled=False)["theirs"](cell, work)
    assert len(seen) == len(work.sets)
    if op in ("decode", "prefill_cached"):
        rows = cell.sizes["num_seqs"] * cell.sizes["kv_len"]
        assert seen[0]["pool"].shape == (rows, 4, 128)
        assert seen[0]["pool"].data_ptr() == work.sets[0]["k_pool"].data_ptr()
    if op == "kv_scatter":
        assert seen[0]["pool"].is_contiguous()
        assert seen[0]["rows64"].dtype == torch.int64


EXPERTS = {"num_tokens": 3, "num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
SMALL_OF = {
    "rms_norm": {"num_tokens": 3, "d": 64},
    "add_rms_norm": {"num_tokens": 3, "d": 64},
    "swiglu": {"num_tokens": 3, "d": 64},
    "rope": {"num_tokens": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "rotary_dim": 64},
    "vocab_embedding": {"num_tokens": 3, "vocab_size": 50, "hidden_size": 64},
    "dense_gemm": {"num_tokens": 3, "n": 32, "k": 64},
    "update_kv_buffer": {"num_tokens": 5, "num_kv_heads": 2, "head_dim": 64, "num_rows": 64},
    "rope_kv_write": {"num_tokens": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "num_rows": 64},
    "qk_norm_rope_kv_write": {"num_tokens": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "num_rows": 64},
    "update_kv_index": {"num_updates": 4, "num_table_rows": 4, "num_columns": 8},
    "flash_decoding": attention_sizes(4, 2, 64, 3, 1, 32),
    "flashattention2_nopad": attention_sizes(4, 2, 64, 2, 16, 16),
    "flash_decoding_fp8": attention_sizes(4, 2, 64, 3, 1, 32),
    "flashattention2_nopad_fp8": attention_sizes(4, 2, 64, 2, 16, 16),
    "update_kv_buffer_fp8": {"num_tokens": 5, "num_kv_heads": 2, "head_dim": 64, "num_rows": 64},
    "sample": {"num_seqs": 3, "vocab_size": 300},
    "top_logprobs": {"num_seqs": 3, "vocab_size": 300},
    "fp8_gemm": {"num_tokens": 3, "n": 40, "k": 256, "group": 128},
    "int8_gemm": {"num_tokens": 3, "n": 40, "k": 64},
    "w8a16_gemm": {"num_tokens": 3, "n": 40, "k": 64, "group": 64},
    "w4a16_gemm": {"num_tokens": 3, "n": 40, "k": 64, "group": 32},
    "nvfp4_gemm": {"num_tokens": 3, "n": 40, "k": 64},
    "mxfp4_gemm": {"num_tokens": 3, "n": 40, "k": 64},
    "quantize_fp8": {"num_tokens": 3, "k": 256, "group": 128},
    "quantize_int8": {"num_tokens": 3, "k": 64},
    "fused_moe": EXPERTS,
    "fused_moe_fp8": {**EXPERTS, "group": 0},
    "fused_moe_w8a16": {**EXPERTS, "group": 0},
    "fused_moe_w4a16": {**EXPERTS, "group": 32},
    "fused_moe_mxfp4": EXPERTS,
}
VARIED = sorted({(cell.op, cell.variant) for bench in BENCHES for cell in bench.cells})


@pytest.mark.parametrize(("op", "variant"), VARIED)
def test_the_peers_that_torch_gives_pass_the_check(clock, op, variant):
    """cuDNN's and flash attention are of a GPU: there they may say so, and nothing else."""
    bench = next(bench for bench in BENCHES if any(cell.op == op for cell in bench.cells))
    cell = Cell(op, SMALL_OF[op], "float32", variant)
    lines = session().run(Bench(bench.name, (cell,), peers=bench.peers, build=bench.build, gate=bench.gate))
    for line in lines:
        on_gpu = "sdpa_flash" in line["arm"] or "cudnn" in line["arm"]
        assert line["us"] == 5.0 or line["skipped"] or (on_gpu and "kernel" in line["problem"]), line


@pytest.mark.parametrize("variant", [kv_pool.SCATTERED, kv_pool.PAGES, kv_pool.PAST_INT32])
def test_slots_are_distinct_rows_of_the_pool(variant):
    generator = torch.Generator().manual_seed(3)
    for tokens in (1, 17, 64):
        slots = kv_pool.slots_of(variant, tokens, 64, generator)
        assert slots.dtype == torch.int32
        assert len(set(slots.tolist())) == tokens
        assert 0 <= int(slots.min()) <= int(slots.max()) < 64
        assert variant != kv_pool.PAST_INT32 or int(slots[0]) == 63


def test_a_pool_past_int32_is_past_it():
    sizes = [cell.sizes for cell in bench_kv_write.BENCH.cells if cell.variant == kv_pool.PAST_INT32]
    assert all(each["num_rows"] * 2 * each["num_kv_heads"] * each["head_dim"] > 1 << 31 for each in sizes)


@pytest.mark.parametrize(("fault", "says"), [("shift", "do not hold"), ("extra", "no slot names"), ("none", "")])
def test_a_scatter_is_checked_row_by_row(fault, says):
    cell = Cell("update_kv_buffer", SMALL_OF["update_kv_buffer"], "float32", kv_pool.SCATTERED)
    work = kv_pool.scatter_workload(cell, "cpu")

    def write(k, v, slot_mapping, k_pool, v_pool):
        rows = slot_mapping.long()
        k_pool[rows if fault != "shift" else (rows + 1) % 64] = k
        v_pool[rows] = v
        if fault == "extra":
            v_pool[next(row for row in range(64) if row not in rows.tolist())] = 1.0

    check = kv_pool.gate(cell, work)
    assert says in check("arm", write)
    assert bool(check("arm", write)) is (fault != "none")


def test_a_peers_token_must_be_one_that_the_rules_keep():
    logits = torch.tensor([[5.0, 4.0, 3.0, -9.0]])
    dropped = bench_sampling.dropped
    assert dropped(logits, torch.tensor([0]), "greedy") == ""
    assert dropped(logits, torch.tensor([1]), "greedy")
    assert dropped(logits, torch.tensor([1]), "top_p") == ""
    assert dropped(logits, torch.tensor([3]), "top_p")
    assert dropped(logits, torch.tensor([-7]), "temperature")


def test_found_entries_replace_shipped_ones_and_fallback_rows_stay_out(tmp_path):
    for name in ("found", "shipped"):
        (tmp_path / name).mkdir()

    targets = {row.name: row.target for row in catalog().all_rows()}

    def entry(row, latency, failure="", source=None):
        found = {"op": "swiglu", "row": row, "source_hash": source or source_hash(targets[row]), "failure": failure}
        return found | {"latencies_us": {"x": latency}}

    def store(entries):
        return json.dumps({"format": 1, "device": "h200", "entries": entries})

    (tmp_path / "shipped" / "h200.json").write_text(
        store([entry("triton.swiglu", 1), entry("triton.rope", 2), entry("triton.rope", 9, source="an older one")])
    )
    (tmp_path / "found" / "h200.json").write_text(
        store([entry("triton.swiglu", 3), entry("torch.swiglu", 4), entry("triton.rms_norm", 5, "it failed")])
    )
    write_joined("evidence", "h200", tmp_path / "found", tmp_path / "shipped", tmp_path / "out")
    entries = json.loads((tmp_path / "out" / "h200.json").read_text())["entries"]
    assert {each["row"]: each["latencies_us"]["x"] for each in entries} == {"triton.swiglu": 3, "triton.rope": 2}
