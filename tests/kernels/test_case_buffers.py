"""The cases of verify are hostile: NaN inside and around, and every view of the contract in its turn."""

import pytest
import torch

from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.ops.activation.rows import SWIGLU
from rapid_llm.kernels.ops.kvcache.rows import UPDATE_KV_BUFFER
from rapid_llm.kernels.verify.buffers import GUARD_INTEGER, Stage, once_rounded, view_of
from rapid_llm.kernels.verify.case import compare

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", sorted(catalog().contracts))
def test_a_sweep_has_every_view_of_every_tensor(op):
    contract = catalog().contract(op)
    for arg in contract.tensors:
        views = {
            view_of(contract, arg.name, sizes, getattr(torch, dtype)) for dtype in contract.dtypes for sizes in contract.sweep
        }
        assert views == {"plain", *arg.views}, arg.name


@pytest.mark.parametrize("op", sorted(catalog().contracts))
def test_a_sweep_has_no_work_and_one_unit_of_it(op):
    contract = catalog().contract(op)
    counts = {sizes.get("num_tokens", sizes.get("num_seqs", sizes.get("num_updates"))) for sizes in contract.sweep}
    assert {0, 1} <= counts


@pytest.mark.parametrize("op", sorted(catalog().contracts))
def test_a_sweep_and_its_defaults_stay_within_the_maxima(op):
    contract = catalog().contract(op)
    for sizes in (*contract.sweep, contract.defaults):
        assert set(sizes) == set(contract.maxima)
        assert all(value <= contract.maxima[name] for name, value in sizes.items())


@pytest.mark.parametrize("num_tokens", range(12))
def test_a_placed_tensor_holds_its_values_and_nan_stands_around_it(num_tokens):
    stage = Stage(SWIGLU, {"num_tokens": num_tokens, "d": 5}, torch.float32, CPU)
    values = torch.randn(num_tokens, 10)

    placed = stage.place("gate_up", values, written=True)

    assert torch.equal(placed, values)
    storage = torch.empty(0).set_(placed.untyped_storage())
    assert int(storage.isnan().sum()) == storage.numel() - values.numel() >= 128
    assert [compare(check).problem for check in stage.guards()] == [""]


def test_a_write_beside_an_output_is_found():
    stage = Stage(SWIGLU, {"num_tokens": 3, "d": 5}, torch.bfloat16, CPU)
    out = stage.unwritten("out", (3, 5))
    assert out.isnan().all()

    torch.empty(0, dtype=torch.bfloat16).set_(out.untyped_storage())[63] = 1.0

    assert ["around out" in compare(check).problem for check in stage.guards()] == [True]


def test_a_write_between_the_pools_and_their_guards_is_found():
    sizes = next(s for s in UPDATE_KV_BUFFER.sweep if view_of(UPDATE_KV_BUFFER, "k_pool", s, torch.float32) == "row_strided")
    stage = Stage(UPDATE_KV_BUFFER, sizes, torch.float32, CPU)
    shape = (sizes["num_rows"], sizes["num_kv_heads"], sizes["head_dim"])
    k_pool, v_pool = stage.place_pools(torch.zeros(shape), torch.ones(shape))
    assert k_pool.untyped_storage().data_ptr() == v_pool.untyped_storage().data_ptr()
    assert (k_pool == 0).all()
    assert (v_pool == 1).all()
    assert [compare(check).problem for check in stage.guards()] == [""]

    torch.empty(0).set_(k_pool.untyped_storage())[-1] = 0.0

    assert [bool(compare(check).problem) for check in stage.guards()] == [True]


def test_an_integer_output_holds_the_guard_value_before_the_call():
    stage = Stage(catalog().contract("sample"), {"num_seqs": 3, "vocab_size": 8}, torch.float32, CPU)
    assert (stage.unwritten("out_ids", (3,)) == GUARD_INTEGER).all()


@pytest.mark.parametrize(
    ("op", "guard"), [pytest.param("quantize_int8", 0x80, id="int8"), pytest.param("quantize_fp8", 0x7F, id="e4m3")]
)
def test_bytes_are_guarded_inside_and_around(op, guard):
    """torch says of no e4m3 number that it is NaN, and 1 << 30 is no byte."""
    contract = catalog().contract(op)
    stage = Stage(contract, contract.sweep[-1], torch.float32, CPU)
    out = stage.unwritten("out", (3, 5))
    assert (out.view(torch.uint8) == guard).all()
    assert [compare(check).problem for check in stage.guards()] == [""]

    torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage())[63] = 0

    assert ["around out" in compare(check).problem for check in stage.guards()] == [True]


def test_placed_bytes_are_those_that_were_given():
    contract = catalog().contract("fp8_gemm")
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for sizes in contract.sweep:
        placed = Stage(contract, sizes, torch.float32, CPU).place("weight", every.view(torch.float8_e4m3fn))
        assert torch.equal(placed.view(torch.uint8), every)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_tolerance_passes_one_rounding_and_stays_below_the_spread_of_the_data(dtype):
    exact = torch.randn(10_000, dtype=torch.float64)
    rtol, atol = once_rounded(dtype)
    torch.testing.assert_close(exact.to(dtype).double(), exact, rtol=rtol, atol=atol)
    assert atol < 1e-3 * float(exact.std())
    with pytest.raises(AssertionError):
        torch.testing.assert_close((exact * (1 + 3 * torch.finfo(dtype).eps + 1e-5)), exact, rtol=rtol, atol=atol)
