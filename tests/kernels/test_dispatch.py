"""Catalog, ranking and dispatch: which row serves, and every reason why another does not."""

import subprocess
import sys

import pytest
import torch

from rapid_llm.errors import ConfigError, NoKernelError
from rapid_llm.kernels.device import device_info
from rapid_llm.kernels.dispatcher import ranking
from rapid_llm.kernels.dispatcher.catalog import build_catalog, catalog
from rapid_llm.kernels.dispatcher.dispatch import choose, choose_by_size, dispatch, fallback_summary, verified_elsewhere_summary
from rapid_llm.kernels.dispatcher.evidence import latency_key
from rapid_llm.kernels.dispatcher.ranking import Question
from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Family, KernelSpec, Limit
from tests.kernels.synthetic import ANYWHERE, CONTRACT

CPU, H200, T4 = device_info("cpu"), device_info("h200"), device_info("t4")


def _spec(**fields):
    values = {"op": "double", "name": "a.double", "target": "m:double", "requires": ANYWHERE, "dtypes": ("float32",)}
    return KernelSpec(**{**values, **fields})


# ---- the catalog


def test_the_catalog_holds_the_ops_of_all_families():
    families = set(catalog().families.values())

    assert families == {
        "activation",
        "attention",
        "embeddings",
        "fused",
        "gemm",
        "kvcache",
        "moe",
        "norm",
        "quantization",
        "rotary",
        "sampling",
    }
    assert all(catalog().rows[op] for op in catalog().contracts)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        pytest.param([_spec(), _spec()], "'a.double' stands 2 times", id="row-twice"),
        pytest.param([_spec(op="doubel")], "no contract.*perhaps 'double'", id="op-without-contract"),
        pytest.param([_spec(target="m.double")], "bad target", id="target-without-function"),
        pytest.param([_spec(target="m-x:double")], "bad target", id="target-no-module-name"),
        pytest.param([_spec(limits={"tokens": Limit()})], "unknown size.*tokens", id="limit-of-an-unknown-size"),
    ],
)
def test_a_catalog_with_a_mistake_does_not_load(rows, told):
    with pytest.raises(ConfigError, match=told):
        build_catalog([Family("synthetic", (CONTRACT,), tuple(rows))])


def test_two_families_may_not_declare_one_op():
    with pytest.raises(ConfigError, match="op 'double' stands 2 times"):
        build_catalog([Family("one", (CONTRACT,), ()), Family("two", (CONTRACT,), ())])


# ---- the choice


def test_dispatch_returns_a_function_that_computes(world):
    world.row("torch.double", fallback=True)

    double = dispatch("double", device=CPU, dtype="float32", d=4)

    out = torch.empty(2, 4)
    double(torch.ones(2, 4), out=out)
    assert (out == 2).all()


def test_equal_questions_get_the_same_function(world):
    world.row("torch.double", fallback=True)

    first = dispatch("double", device=CPU, dtype="float32", d=4, num_tokens=1)

    assert dispatch("double", device=CPU, dtype="float32", num_tokens=1, d=4) is first


def test_a_verified_row_serves_before_a_fallback_of_any_priority(world):
    world.row("torch.double", fallback=True, priority=100)
    world.passed(world.row("native.double"))

    assert choose("double", device=CPU, dtype="float32").name == "native.double"


def test_an_unverified_row_never_serves(world):
    world.row("native.double", priority=100)
    world.row("torch.double", fallback=True)

    assert choose("double", device=CPU, dtype="float32").name == "torch.double"


def test_priority_then_name_orders_rows_without_a_latency(world):
    for name, priority in (("c.double", 0), ("b.double", 5), ("a.double", 0), ("d.double", 5)):
        world.passed(world.row(name, priority=priority))

    names = [verdict.row.name for verdict in _rank(CPU).eligible]

    assert names == ["b.double", "d.double", "a.double", "c.double"]


def test_rows_measured_here_rank_by_latency_and_before_the_others(world):
    bucket = latency_key(CONTRACT, "float32", {"num_tokens": 1, "d": 4096})
    world.passed(world.row("slow.double", priority=9), latencies_us={bucket: 20.0})
    world.passed(world.row("fast.double"), latencies_us={bucket: 10.0})
    world.passed(world.row("promising.double", priority=99))

    assert [verdict.row.name for verdict in _rank(CPU).eligible] == ["fast.double", "slow.double", "promising.double"]


@pytest.mark.parametrize(
    ("others_us", "order"),
    [
        pytest.param(10.3, ["preferred", "other", "library"], id="within-what-measuring-is-off-by"),
        pytest.param(10.5, ["other", "library", "preferred"], id="slower-than-that"),
    ],
)
def test_of_rows_as_fast_as_each_other_the_preferred_one_is_first_and_a_library_last(world, others_us, order):
    bucket = latency_key(CONTRACT, "float32", {"num_tokens": 1, "d": 4096})
    world.passed(world.row("library.double", priority=99, library=True), latencies_us={bucket: others_us})
    world.passed(world.row("preferred.double", priority=9), latencies_us={bucket: others_us})
    world.passed(world.row("other.double"), latencies_us={bucket: 10.0})

    assert [verdict.row.name.partition(".")[0] for verdict in _rank(CPU).eligible] == order


def test_a_latency_of_another_shape_device_or_dtype_does_not_rank(world):
    bucket = latency_key(CONTRACT, "float32", {"num_tokens": 1, "d": 4096})
    world.passed(world.row("first.double", priority=1))
    world.passed(world.row("elsewhere.double"), device="h200", latencies_us={bucket: 1.0})
    world.passed(world.row("shape.double"), latencies_us={latency_key(CONTRACT, "float32", {"num_tokens": 64, "d": 4096}): 1.0})
    world.passed(world.row("dtype.double"), latencies_us={latency_key(CONTRACT, "bfloat16", {"num_tokens": 1, "d": 4096}): 1.0})

    assert _rank(CPU).eligible[0].row.name == "first.double"


def test_a_rejected_row_lists_every_reason(world):
    world.row(
        "native.double",
        requires=CapabilityRequirement(min_sm=90, native_fp8=True, min_smem=200_000, packages=("no_such_package",)),
        dtypes=("float16",),
        phase="decode",
        limits={"d": Limit(high=2048, multiple=64), "num_tokens": Limit(high=16)},
    )

    (verdict,) = _rank(T4, sizes={"d": 5000, "num_tokens": 17}).rejected

    told = "\n".join(verdict.reasons)
    for reason in ("sm90 or later", "e4m3", "200,000 bytes", "no_such_package is not installed", "serves float16, not float32"):
        assert reason in told
    for reason in ("decode only", "d 0..2048 in steps of 64, asked for 5,000", "num_tokens 0..16, asked for 17", "unverified"):
        assert reason in told
    assert len(verdict.reasons) == 9


def test_packages_are_not_asked_for_on_a_device_of_another_machine(world):
    row = world.row("native.double", requires=CapabilityRequirement(packages=("no_such_package",)))
    world.passed(row, device="h200")

    assert not _rank(H200, here=True).eligible
    assert [verdict.row for verdict in _rank(H200, here=False).eligible] == [row]


@pytest.mark.parametrize(
    ("installed", "served"),
    [("3.5", False), ("3.6", True), ("3.9", True), ("3.10", False)],
)
def test_the_installed_triton_must_be_one_that_the_row_supports(installed, served, world, monkeypatch):
    monkeypatch.setattr(ranking, "is_installed", lambda _: True)
    monkeypatch.setattr(ranking, "triton_minor", lambda: installed)
    needs = CapabilityRequirement(packages=("triton",), min_triton=(3, 6), max_triton=(3, 9))
    world.passed(world.row("triton.double", requires=needs), device="h200")

    assert bool(_rank(H200).eligible) is served


def test_a_size_left_out_must_be_served_whatever_it_is(world):
    world.passed(world.row("few.double", limits={"num_tokens": Limit(low=1, high=16)}, priority=1))
    world.passed(world.row("all.double", limits={"num_tokens": Limit(low=1, high=1 << 20)}))

    assert choose("double", device=CPU, dtype="float32", d=8).name == "all.double"
    assert choose("double", device=CPU, dtype="float32", d=8, num_tokens=7).name == "few.double"


def test_a_size_past_the_contract_is_served_by_no_row(world):
    world.row("torch.double", fallback=True)

    with pytest.raises(NoKernelError, match=r"d 70,000 is past the contract's maximum of 65,536"):
        dispatch("double", device=CPU, dtype="float32", d=70_000)


def test_a_row_of_one_phase_serves_that_phase_only(world):
    world.passed(world.row("decode.double", phase="decode", priority=1))
    world.passed(world.row("all.double"))

    assert choose("double", "decode", device=CPU, dtype="float32").name == "decode.double"
    assert choose("double", "prefill", device=CPU, dtype="float32").name == "all.double"
    assert choose("double", device=CPU, dtype="float32").name == "all.double"


def test_no_kernel_error_lists_every_row_and_all_its_reasons(world):
    world.row("native.double", requires=CapabilityRequirement(min_sm=80))
    world.row("torch.double", fallback=True, dtypes=("bfloat16",), limits={"d": Limit(high=8)})

    with pytest.raises(NoKernelError) as caught:
        dispatch("double", device=CPU, dtype="float32", d=16)

    told = str(caught.value)
    for part in (
        "native.double: needs a cuda device",
        "no passing run",
        "torch.double: serves bfloat16, not float32; serves d 0..8",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("op", "dtype", "sizes", "told"),
    [
        pytest.param("duble", "float32", {}, "perhaps 'double'", id="op"),
        pytest.param("double", "bfloat", {}, "perhaps 'bfloat16'", id="dtype"),
        pytest.param("double", "float32", {"num_token": 1}, "perhaps 'num_tokens'", id="size"),
        pytest.param("double", "float32", {"d": -1}, "d=-1", id="negative"),
    ],
)
def test_a_misspelt_question_is_refused_with_the_nearest_name(op, dtype, sizes, told, world):
    world.row("torch.double", fallback=True)

    with pytest.raises(ConfigError, match=told):
        dispatch(op, device=CPU, dtype=dtype, **sizes)


def test_a_target_without_its_function_is_refused(world):
    world.row("torch.double", fallback=True, target=world.module("kernel_empty", "x = 1\n"))

    with pytest.raises(ConfigError, match="kernel_empty:double"):
        dispatch("double", device=CPU, dtype="float32")


# ---- RAPID_KERNELS


def test_an_override_serves_in_place_of_the_ranked_row(world, monkeypatch):
    world.passed(world.row("native.double"))
    world.row("torch.double", fallback=True)
    assert choose("double", device=CPU, dtype="float32").name == "native.double"

    monkeypatch.setenv("RAPID_KERNELS", "double=torch.double")

    assert choose("double", device=CPU, dtype="float32").name == "torch.double"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        pytest.param("double=torch.doubel", "unknown row of double.*perhaps 'torch.double'", id="unknown-row"),
        pytest.param("duble=torch.double", "unknown op.*perhaps 'double'", id="unknown-op"),
        pytest.param("double=native.double", "native.double, which may not serve.*no passing run", id="not-eligible"),
    ],
)
def test_an_override_that_cannot_be_honoured_is_refused(override, told, world, monkeypatch):
    world.row("native.double")
    world.row("torch.double", fallback=True)
    monkeypatch.setenv("RAPID_KERNELS", override)

    with pytest.raises(ConfigError, match=told) as caught:
        dispatch("double", device=CPU, dtype="float32")

    assert "RAPID_KERNELS" in str(caught.value)


# ---- by size


def _measured(world, row, times, **fields):
    """Evidence of ``row`` on an H200, with latencies by number of tokens."""
    latencies = {latency_key(CONTRACT, "float32", {"num_tokens": tokens, "d": 4096}): us for tokens, us in times.items()}
    world.passed(row, device="cpu", latencies_us=latencies, **fields)


def test_each_bucket_of_tokens_gets_the_row_that_is_fastest_there(world):
    few, many = world.row("few.double", priority=5), world.row("many.double")
    world.row("torch.double", fallback=True)
    _measured(world, few, {1: 1.0, 64: 9.0})
    _measured(world, many, {1: 2.0, 64: 8.0})

    pieces = choose_by_size("double", device=CPU, dtype="float32", d=4096)

    # 8 tokens lie as near to 1 as to 64: the smaller decides
    assert [(most, row.name) for most, row in pieces] == [(8, "few.double"), (1 << 20, "many.double")]


def test_by_size_rows_as_fast_as_each_other_serve_as_they_are_ranked(world):
    preferred, library = world.row("preferred.double", priority=5), world.row("library.double", priority=9, library=True)
    _measured(world, preferred, {1: 1.03, 64: 9.0})
    _measured(world, library, {1: 1.0, 64: 8.0})

    pieces = choose_by_size("double", device=CPU, dtype="float32", d=4096)

    assert [row.name for _, row in pieces] == ["preferred.double", "library.double"]
    for tokens, (_, row) in zip((1, 64), pieces, strict=True):
        assert choose("double", device=CPU, dtype="float32", num_tokens=tokens, d=4096) is row


def test_without_latencies_one_row_serves_every_size(world):
    for name in ("a.double", "b.double"):
        world.passed(world.row(name))
    assert [row.name for _, row in choose_by_size("double", device=CPU, dtype="float32", d=4096)] == ["a.double"]


def test_latencies_of_an_unverified_row_and_of_another_source_do_not_count(world):
    fast, sure = world.row("fast.double"), world.row("sure.double")
    _measured(world, sure, {1: 2.0})
    _measured(world, fast, {1: 1.0}, source_hash="0" * 64)
    assert [row.name for _, row in choose_by_size("double", device=CPU, dtype="float32", d=4096)] == ["sure.double"]


def test_an_override_serves_every_size(world, monkeypatch):
    for name in ("few.double", "many.double"):
        _measured(world, world.row(name), {1: len(name), 64: 1.0})
    monkeypatch.setenv("RAPID_KERNELS", "double=many.double")
    assert [row.name for _, row in choose_by_size("double", device=CPU, dtype="float32", d=4096)] == ["many.double"]


# ---- the start line


def test_the_start_line_counts_rows_that_serve_on_runs_made_elsewhere(world):
    world.passed(world.row("torch.double", fallback=True), device="h200")
    world.passed(world.row("here.double"))
    assert verified_elsewhere_summary(CPU) is None

    world.passed(world.row("there.double"), device="h200", seconds=12.4)

    line = verified_elsewhere_summary(CPU)
    assert "1 kernel row serves on cpu by runs made on h200" in line
    assert "rapid-llm kernels verify" in line
    assert "12 s" in line


def test_the_start_line_names_ops_that_fall_back_on_a_gpu_with_the_reasons(world):
    world.row("torch.double", fallback=True)
    world.row("native.double", requires=CapabilityRequirement(min_sm=80))

    assert fallback_summary([Question("double", CPU, "float32", {})]) is None
    line = fallback_summary([Question("double", T4, "float32", {"d": 4}), Question("double", T4, "float32", {"d": 8})])

    assert "1 op is served by plain torch on t4" in line
    assert "native.double: needs sm80 or later, t4 is sm75" in line


def test_the_start_line_asks_what_the_layers_asked(world):
    world.row("torch.double", fallback=True)
    world.passed(world.row("native.double", limits={"d": Limit(high=64)}), device="h200")

    assert fallback_summary([Question("double", H200, "float32", {"d": 64}, here=False)]) is None
    assert "native.double: serves d" in fallback_summary([Question("double", H200, "float32", {"d": 65}, here=False)])


# ---- import rules


def test_the_tier_imports_and_answers_without_torch_or_triton():
    program = """
import sys
sys.modules["torch"] = sys.modules["triton"] = sys.modules["numpy"] = None
import rapid_llm.kernels as kernels
from rapid_llm.kernels.dispatcher import catalog, dispatch, evidence, explain, ranking
from rapid_llm.kernels.ops import interfaces, tile_policy
for name in kernels.__all__:
    getattr(kernels, name)
row = dispatch.choose("swiglu", device=kernels.device_info("cpu"), dtype="float32", d=1536)
print(row.name, len(kernels.catalog().contracts) > 8)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.stdout.strip(), done.stderr) == ("torch.swiglu True", "")


def test_importing_the_kernel_package_loads_nothing_below_it():
    program = (
        "import sys, rapid_llm.kernels; print(sorted(m for m in sys.modules if m.startswith(('rapid_llm.kernels.', 'torch'))))"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_an_unknown_export_is_an_attribute_error():
    import rapid_llm.kernels

    with pytest.raises(AttributeError, match="no_such_kernel"):
        _ = rapid_llm.kernels.no_such_kernel


def _rank(device, dtype="float32", sizes=None, here=True):
    from rapid_llm.kernels.dispatcher.evidence import load_records

    question = ranking.Question("double", device, dtype, sizes or {}, here=here)
    return ranking.rank(question, catalog(), load_records())
