"""verify: what passed becomes evidence, what failed leaves service."""

import sys
from types import SimpleNamespace

import pytest
import torch

from rapid_llm.entrypoints import kernels_cli
from rapid_llm.errors import ConfigError, NoKernelError
from rapid_llm.kernels.device import device_info
from rapid_llm.kernels.dispatcher import ranking
from rapid_llm.kernels.dispatcher.dispatch import choose, dispatch
from rapid_llm.kernels.dispatcher.evidence import load_records
from rapid_llm.kernels.measure.tuner import is_verified_here
from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Limit
from rapid_llm.kernels.provenance import source_hash
from rapid_llm.kernels.verify.case import Case, Check, compare
from rapid_llm.kernels.verify.runner import verify

CPU = device_info("cpu")


def make_double(sizes, dtype, device, generator, hard):
    shape = (sizes["num_tokens"], sizes["d"])
    x = (torch.randn(shape, generator=generator) * (1e30 if hard == "huge" else 1)).to(dtype).to(device)
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    return Case("double", {"x": x, "out": out}, [Check("out", lambda: out, 2 * x.double(), rtol=1e-6, atol=0.0)])


@pytest.fixture(autouse=True)
def _cases(world, monkeypatch):
    cases = SimpleNamespace(CASES={"double": make_double})
    monkeypatch.setitem(sys.modules, "rapid_llm.kernels.verify.synthetic", cases)
    monkeypatch.setattr(sys.modules["rapid_llm.kernels.verify.runner"], "current_device", lambda kind: CPU)


def test_a_row_that_passes_is_verified_here_and_serves(world):
    row = world.row("native.double")
    with pytest.raises(NoKernelError):
        dispatch("double", device=CPU, dtype="float32")

    (result,) = verify(["double"], CPU)

    assert result.passed
    assert result.cases == (
        "float32-num_tokens=0,d=8",
        "float32-num_tokens=0,d=8-huge",
        "float32-num_tokens=3,d=5",
        "float32-num_tokens=3,d=5-huge",
        "bfloat16-num_tokens=0,d=8",
        "bfloat16-num_tokens=0,d=8-huge",
        "bfloat16-num_tokens=3,d=5",
        "bfloat16-num_tokens=3,d=5-huge",
    )
    assert choose("double", device=CPU, dtype="float32") == row


def test_the_record_says_what_ran_on_what_and_how_to_repeat_it(world):
    row = world.row("native.double")

    verify(["double"], CPU)

    (record,) = load_records()
    assert (record.row, record.op, record.device, record.source_hash) == (row.name, "double", "cpu", source_hash(row.target))
    assert record.cases["count"] == len(record.cases["ids"]) == 8
    assert record.errors == {dtype: {"max_abs": 0.0, "max_rel": 0.0} for dtype in ("float32", "bfloat16")}
    assert record.command == "rapid-llm kernels verify --op double"
    assert record.toolchain["torch"].startswith(torch.__version__.split("+")[0])
    assert record.failure == ""


WRONG = "def double(x, *, out):\n    out.copy_(x * 2)\n    out[out.shape[0] - 1:, 3:4] += 0.5\n    return out\n"


def test_a_row_that_is_wrong_fails_with_the_case_and_its_largest_error(world):
    world.row("native.double", target=world.module("kernel_wrong", WRONG))

    (result,) = verify(["double"], CPU)

    assert not result.passed
    assert result.failures[0].case == "float32-num_tokens=3,d=5"
    assert "out: 1 of 15 elements off, first at [2, 3]" in result.failures[0].problem
    assert result.failures[0].max_abs == pytest.approx(0.5, rel=1e-3)


def test_a_row_that_fails_loses_its_older_evidence_and_leaves_service(world):
    row = world.row("native.double", target=world.module("kernel_wrong", WRONG))
    world.row("torch.double", fallback=True)
    world.passed(row)
    world.passed(row, device="h200")
    assert choose("double", device=CPU, dtype="float32") == row

    verify(["double"], CPU)

    assert choose("double", device=CPU, dtype="float32").name == "torch.double"
    here = [record for record in load_records() if record.device == "cpu" and record.row == row.name]
    assert [record.failure.split(":")[0] for record in here] == ["float32-num_tokens=3,d=5"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        pytest.param("    raise RuntimeError('no image')\n", "RuntimeError: no image", id="raises"),
        pytest.param("    return out\n", "elements off, first at [0, 0]: nan", id="writes-nothing"),
        pytest.param("    out.copy_(x * 2 + 1e-3)\n", "largest error 0.001", id="slightly-off"),
    ],
)
def test_every_way_to_fail_is_a_failure_of_its_case(body, told, world):
    world.row("native.double", target=world.module("kernel_bad", f"def double(x, *, out):\n{body}"))

    (result,) = verify(["double"], CPU)

    assert any(told in failure.problem for failure in result.failures)


def test_a_row_runs_within_its_limits_and_dtypes_only(world):
    world.row("native.double", dtypes=("bfloat16",), limits={"num_tokens": Limit(low=1)})

    (result,) = verify(["double"], CPU)

    assert result.cases == ("bfloat16-num_tokens=3,d=5", "bfloat16-num_tokens=3,d=5-huge")


@pytest.mark.parametrize(
    ("needs", "told"),
    [
        pytest.param(CapabilityRequirement(min_sm=80), "needs a cuda device", id="device"),
        pytest.param(CapabilityRequirement(device_types=("cpu",), packages=("no_such_package",)), "not installed", id="package"),
    ],
)
def test_a_row_that_cannot_run_here_is_skipped_with_the_reason_and_leaves_no_record(needs, told, world):
    world.row("native.double", requires=needs)

    (result,) = verify(None, CPU)

    assert told in result.skipped[0]
    assert not result.passed
    assert load_records() == ()


def test_a_row_of_another_triton_is_skipped_and_does_not_fail(world, monkeypatch):
    monkeypatch.setattr(ranking, "is_installed", lambda _: True)
    monkeypatch.setattr(ranking, "triton_minor", lambda: "3.9")
    world.row("gluon.double", requires=CapabilityRequirement(device_types=("cpu",), packages=("triton",), max_triton=(3, 6)))

    (result,) = verify(None, CPU)

    assert result.skipped == ("needs Triton 3.6 or earlier, 3.9 is installed",)
    assert load_records() == ()
    assert is_verified_here("double", CPU)  # so that the tiles of the op's other rows can be searched


@pytest.mark.parametrize(
    ("ops", "device", "told"),
    [
        pytest.param(["duble"], "cpu", "perhaps 'double'", id="unknown-op"),
        pytest.param(["double"], "h200", "got h200, wanted cpu", id="not-this-machine"),
    ],
)
def test_what_cannot_be_verified_is_refused(ops, device, told, world):
    world.row("torch.double", fallback=True)

    with pytest.raises(ConfigError, match=told):
        verify(ops, device_info(device))


def test_an_op_without_cases_is_refused_before_anything_runs(world, monkeypatch):
    world.row("native.double")
    monkeypatch.setitem(sys.modules, "rapid_llm.kernels.verify.synthetic", SimpleNamespace(CASES={}))

    with pytest.raises(ConfigError, match="double has no verify cases"):
        verify(None, CPU)
    assert load_records() == ()


def test_the_command_prints_a_line_a_row_and_fails_when_a_case_does(world, capsys, monkeypatch):
    monkeypatch.setattr("rapid_llm.kernels.device.current_device", lambda kind: CPU)
    world.row("good.double")
    arguments = SimpleNamespace(op=["double"])
    assert kernels_cli.run_verify(arguments) == 0

    world.row("gpu.double", requires=CapabilityRequirement(min_sm=80))
    world.row("wrong.double", target=world.module("kernel_wrong", WRONG))
    assert kernels_cli.run_verify(arguments) == 1

    told = capsys.readouterr().out
    for line in (
        "passed   double  good.double: 8 cases",
        "skipped  double  gpu.double: needs a cuda",
        "FAILED   double  wrong.double: ",
    ):
        assert line in told


# ---- the comparison

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("actual", "expected", "told"),
    [
        pytest.param([1.0], [1.0005], "", id="within"),
        pytest.param([1.0], [1.01], "1 of 1 elements off", id="outside"),
        pytest.param([INF, NAN, -INF], [INF, NAN, -INF], "", id="equal-specials"),
        pytest.param([INF], [-INF], "elements off", id="other-infinity"),
        pytest.param([1.0], [NAN], "elements off", id="number-for-nan"),
        pytest.param([NAN], [1.0], "elements off", id="nan-for-number"),
        pytest.param([[1.0]], [1.0], "has shape [1, 1], wanted [1]", id="shape"),
        pytest.param([], [], "", id="empty"),
        pytest.param([3], [3], "", id="integers-equal"),
        pytest.param([3], [4], "1 of 1 differ", id="integers-one-apart"),
        pytest.param([3.0], [3], "wanted integers", id="floats-for-integers"),
    ],
)
def test_a_comparison_accepts_the_tolerance_and_nothing_more(actual, expected, told):
    reference = torch.tensor(expected)
    reference = reference.double() if reference.is_floating_point() else reference

    result = compare(Check("out", lambda: torch.tensor(actual), reference, rtol=1e-3, atol=0.0))

    assert (told in result.problem) if told else (result.problem == "")


def test_the_largest_errors_are_measured_where_the_reference_is_finite():
    expected = torch.tensor([2.0, 0.0, INF], dtype=torch.float64)

    result = compare(Check("out", lambda: torch.tensor([2.5, 0.1, INF]), expected, rtol=1.0, atol=1.0))

    assert result.max_abs == pytest.approx(0.5)
    assert result.max_rel == pytest.approx(0.25)
