"""explain and the kernels commands: the choice told in full, on any machine, without torch."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from rapid_llm.entrypoints import kernels_cli
from rapid_llm.errors import ConfigError
from rapid_llm.kernels import device as devices
from rapid_llm.kernels.device import device_info, known_devices
from rapid_llm.kernels.dispatcher import ranking
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.evidence import latency_key
from rapid_llm.kernels.dispatcher.explain import explain, served_kernels
from rapid_llm.kernels.dispatcher.ranking import Question
from rapid_llm.kernels.dispatcher.served_kernel import OtherRow
from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Limit
from tests.kernels.synthetic import CONTRACT

CPU, H200 = device_info("cpu"), device_info("h200")
KEYS = {"op", "device", "dtype", "shape", "chosen", "rejected", "eligible", "evidence", "tiles", "contract"}


@pytest.fixture(autouse=True)
def _no_gpu_here(monkeypatch):
    monkeypatch.setattr(kernels_cli, "probe_device", lambda: CPU)
    monkeypatch.setattr(devices, "probe_device", lambda: CPU)


def _run(*arguments):
    parser = argparse.ArgumentParser()
    kernels_cli.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["kernels", *arguments])
    return parsed.run(parsed)


@pytest.mark.parametrize("name", known_devices())
def test_every_op_has_an_explanation_on_every_device(name):
    for op in catalog().contracts:
        told = explain(op, device=device_info(name)).to_json()

        assert set(told) == KEYS
        assert told["chosen"] or told["rejected"]
        assert json.loads(json.dumps(told)) == json.loads(json.dumps(told, allow_nan=False))


def test_the_contract_fills_in_what_was_not_asked(world):
    world.row("torch.double", fallback=True)

    told = explain("double", device=H200, sizes={"d": 64})

    assert (told.dtype, dict(told.shape)) == ("bfloat16", {"num_tokens": 1, "d": 64})
    assert explain("double", device=CPU).dtype == "float32"


def test_every_row_but_the_chosen_one_is_rejected_with_its_reasons(world):
    bucket = latency_key(CONTRACT, "float32", {"num_tokens": 1, "d": 4096})
    world.passed(world.row("fast.double"), latencies_us={bucket: 31.2})
    world.passed(world.row("slow.double"), latencies_us={bucket: 61.3})
    world.passed(world.row("unmeasured.double", priority=5))
    world.row("torch.double", fallback=True)
    world.row("gpu.double", requires=CapabilityRequirement(min_sm=80), limits={"d": Limit(high=64)})

    told = explain("double", device=CPU).to_json()

    reasons = {entry["name"]: entry["reasons"] for entry in told["rejected"]}
    assert told["chosen"] == "fast.double"
    assert reasons["slow.double"] == ["ranked after fast.double: 61.3 us measured here against 31.2"]
    assert reasons["unmeasured.double"] == [
        "ranked after fast.double: no latency measured here for this shape, fast.double has 31.2 us"
    ]
    assert reasons["torch.double"] == ["ranked after fast.double: a fallback row comes last"]
    assert len(reasons["gpu.double"]) == 3
    assert [entry["name"] for entry in told["eligible"]] == ["fast.double", "slow.double", "unmeasured.double", "torch.double"]
    assert told["eligible"][0]["why"] == "fastest of those measured here: 31.2 us"


def test_rows_as_fast_as_each_other_say_what_was_preferred(world):
    bucket = latency_key(CONTRACT, "float32", {"num_tokens": 1, "d": 4096})
    for name, us, fields in (("first", 31.2, {"priority": 5}), ("second", 31.1, {}), ("third", 31.0, {"library": True})):
        world.passed(world.row(f"{name}.double", **fields), latencies_us={bucket: us})

    told = explain("double", device=CPU).to_json()

    assert told["eligible"][0]["why"] == "as fast as any measured here: 31.2 us"
    assert {entry["name"]: entry["reasons"][0] for entry in told["rejected"]} == {
        "second.double": "ranked after first.double: 31.1 us measured here against 31.2, which is as fast; priority 0 against 5",
        "third.double": "ranked after first.double: 31 us measured here against 31.2, which is as fast; it calls a library",
    }


def test_priority_and_name_are_told_as_reasons(world):
    for name, priority in (("a.double", 5), ("b.double", 5), ("c.double", 1)):
        world.passed(world.row(name, priority=priority))

    reasons = {entry["name"]: entry["reasons"] for entry in explain("double", device=CPU).rejected}

    assert reasons == {
        "b.double": ["ranked after a.double: equal in rank, its name sorts later"],
        "c.double": ["ranked after a.double: priority 1 against 5"],
    }


def test_nothing_is_chosen_only_with_reasons(world):
    world.row("native.double")

    told = explain("double", device=CPU)

    assert (told.chosen, told.evidence, told.tiles, told.eligible) == (None, None, None, ())
    assert [entry["name"] for entry in told.rejected] == ["native.double"]
    assert "no passing run of its source" in told.rejected[0]["reasons"][0]
    assert "none: no row may serve" in told.to_text()


def test_the_evidence_of_the_chosen_row_is_told_with_its_record(world):
    row = world.row("native.double")
    record = world.passed(row, device="h200")

    evidence = explain("double", device=CPU).evidence

    assert evidence["state"] == "verified_elsewhere"
    assert evidence["source_hash"] == record.source_hash
    assert evidence["record"]["device"] == "h200"


def test_an_override_is_told_as_the_reason(world, monkeypatch):
    world.passed(world.row("native.double"))
    world.row("torch.double", fallback=True)
    monkeypatch.setenv("RAPID_KERNELS", "double=torch.double")

    told = explain("double", device=CPU)

    assert told.chosen == "torch.double"
    assert told.rejected == ({"name": "native.double", "reasons": ["ranked after torch.double: RAPID_KERNELS asks for that"]},)
    assert {"name": "torch.double", "why": "RAPID_KERNELS asks for it"} in told.eligible


def test_a_triton_row_is_told_with_its_tiles_and_their_source(world, monkeypatch):
    needs = CapabilityRequirement(packages=("triton",), min_sm=80)
    monkeypatch.setattr("rapid_llm.kernels.dispatcher.explain.tiled_ops", lambda: ("double",))
    monkeypatch.setattr("rapid_llm.kernels.ops.tile_policy._HEURISTICS", {"double": TILES})
    monkeypatch.setattr("rapid_llm.kernels.ops.tile_policy._STORED_BY", {"double": ("num_tokens", "d")})
    world.passed(world.row("triton.double", requires=needs), device="h200")

    told = explain("double", device=device_info("l40s"), here=False)

    assert told.chosen == "triton.double"
    assert told.tiles == {"BLOCK_N": 64, "num_warps": 4, "num_stages": 1, "source": "heuristic:PRE_HOPPER"}
    assert "from heuristic:PRE_HOPPER" in told.to_text()


def test_the_tiles_of_an_op_are_not_told_of_a_gluon_row_which_has_its_own(world, monkeypatch):
    monkeypatch.setattr("rapid_llm.kernels.dispatcher.explain.tiled_ops", lambda: ("double",))
    world.passed(world.row("gluon.double", requires=CapabilityRequirement(packages=("triton",), min_sm=80)), device="h200")

    told = explain("double", device=device_info("l40s"), here=False)

    assert told.chosen == "gluon.double"
    assert told.tiles is None


def test_what_serves_is_told_as_the_layers_asked(world):
    world.passed(world.row("native.double"))
    world.row("small.double", limits={"num_tokens": Limit(high=64)})
    world.row("torch.double", fallback=True)
    [served] = served_kernels([Question("double", CPU, "float32", {"d": 4096})])

    assert (served.op, served.row, served.dtype, served.sizes) == ("double", "native.double", "float32", {"d": 4096})
    assert served.because == "no latency is measured here for this shape: by priority (0), then name"
    assert served.evidence.startswith("verified here: ")
    assert served.tiles == ""
    assert served.by_size == []
    assert OtherRow("torch.double", ["ranked after native.double: a fallback row comes last"]) in served.others
    [small] = [other for other in served.others if other.name == "small.double"]
    assert small.reasons[0] == "serves num_tokens 0..64, asked for any num_tokens"


def test_rows_that_differ_by_the_number_of_tokens_are_told_by_it(world):
    for name, latencies in (("few.double", {1: 1.0, 64: 9.0}), ("many.double", {1: 2.0, 64: 8.0})):
        keys = {latency_key(CONTRACT, "float32", {"num_tokens": count, "d": 4096}): us for count, us in latencies.items()}
        world.passed(world.row(name), latencies_us=keys)
    question = Question("double", CPU, "float32", {"d": 4096})

    [served], [invariant] = served_kernels([question]), served_kernels([replace(question, batch_invariant=True)])

    assert served.by_size == [(8, "few.double"), (1 << 20, "many.double")]
    assert invariant.by_size == []


def test_tiles_are_told_with_the_size_that_they_are_of(world, monkeypatch):
    monkeypatch.setattr("rapid_llm.kernels.dispatcher.explain.tiled_ops", lambda: ("double",))
    monkeypatch.setattr("rapid_llm.kernels.ops.tile_policy._HEURISTICS", {"double": TILES})
    monkeypatch.setattr("rapid_llm.kernels.ops.tile_policy._STORED_BY", {"double": ("num_tokens", "d")})
    world.passed(world.row("triton.double", requires=CapabilityRequirement(packages=("triton",), min_sm=80)), device="h200")
    monkeypatch.setattr(ranking, "is_installed", lambda _: True)
    monkeypatch.setattr(ranking, "triton_minor", lambda: "3.9")
    question = Question("double", device_info("l40s"), "bfloat16", {"d": 64})

    [served], [invariant] = served_kernels([question]), served_kernels([replace(question, batch_invariant=True)])

    assert served.tiles == "BLOCK_N=64 num_warps=4 num_stages=1  from heuristic:PRE_HOPPER, at num_tokens=1"
    assert invariant.tiles == "those of one fixed batch, whatever a step holds"


def _double_tile(room, sizes):
    from rapid_llm.kernels.ops.tile_policy import Tile

    return Tile(BLOCK_N=64)


TILES = (_double_tile, ("d",), ("num_tokens",))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        pytest.param({"op": "doubel"}, "perhaps 'double'", id="op"),
        pytest.param({"op": "double", "sizes": {"tokens": 1}}, "perhaps 'num_tokens'", id="size"),
        pytest.param({"op": "double", "dtype": "float31"}, "perhaps 'float32'", id="dtype"),
    ],
)
def test_a_misspelt_question_is_refused_with_the_nearest_name(arguments, told, world):
    world.row("torch.double", fallback=True)
    op = arguments.pop("op")

    with pytest.raises(ConfigError, match=told):
        explain(op, device=CPU, **arguments)


def test_a_dtype_that_the_op_does_not_serve_is_an_answer_not_an_error(world):
    world.row("torch.double", fallback=True)

    told = explain("double", device=CPU, dtype="float16")

    assert told.chosen is None
    assert told.rejected[0]["reasons"] == ["serves float32, bfloat16, not float16"]


# ---- commands


def test_list_prints_one_object_a_row(world, capsys):
    world.row("torch.double", fallback=True)
    world.passed(world.row("native.double", requires=CapabilityRequirement(min_sm=80)), device="h200")

    assert _run("list", "--json", "--device", "h200") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["op"], row["name"], row["state"]) for row in rows] == [
        ("double", "torch.double", "fallback"),
        ("double", "native.double", "verified_here"),
    ]

    assert _run("list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "double  torch.double   fallback",
        "double  native.double  unverified  needs a cuda device, cpu is cpu",
    ]


def test_explain_prints_text_or_one_object(world, capsys):
    world.row("torch.double", fallback=True)
    world.row("native.double", requires=CapabilityRequirement(min_sm=80))

    assert _run("explain", "double", "--shape", "d=64, num_tokens=7") == 0
    text = capsys.readouterr().out
    assert "double  (cpu, float32, num_tokens=7 d=64)" in text
    assert "chosen   torch.double" in text
    assert "rejected native.double  needs a cuda device" in text

    assert _run("explain", "double", "--device", "h200", "--dtype", "bf16", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == KEYS
    assert (told["device"], told["dtype"]) == ("h200", "bfloat16")


def test_the_default_device_of_the_commands_is_the_probed_one(world, capsys, monkeypatch):
    world.row("torch.double", fallback=True)
    monkeypatch.setattr(kernels_cli, "probe_device", lambda: H200)

    _run("explain", "double", "--json")

    assert json.loads(capsys.readouterr().out)["device"] == "h200"


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("d", id="no-value"),
        pytest.param("d=", id="empty-value"),
        pytest.param("=3", id="no-name"),
        pytest.param("d=-3", id="negative"),
        pytest.param("d=3.5", id="fraction"),
        pytest.param("d=²", id="not-ascii"),
        pytest.param("d=3,d=4", id="twice"),
    ],
)
def test_a_shape_that_cannot_be_read_is_refused(shape, world):
    world.row("torch.double", fallback=True)

    with pytest.raises(ConfigError, match="--shape"):
        _run("explain", "double", "--shape", shape)


def test_an_unknown_device_is_refused_and_the_nearest_is_named(world):
    with pytest.raises(ConfigError, match=r"'h2oo'.*'h200'"):
        _run("explain", "double", "--device", "h2oo")


def test_list_and_explain_answer_with_torch_and_triton_blocked():
    program = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None
import argparse
from rapid_llm.entrypoints.kernels_cli import add_parser
parser = argparse.ArgumentParser()
add_parser(parser.add_subparsers())
for line in ("list --json --device h200", "list --device t4", "explain swiglu --device b200 --json", "explain sample"):
    arguments = parser.parse_args(["kernels", *line.split()])
    assert arguments.run(arguments) == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert '"chosen": "triton.swiglu"' in done.stdout  # verified elsewhere, by the evidence that ships
