"""add_rms_norm_fp8 and swiglu_fp8 against their float64 twins, on every row that this machine runs."""

import importlib
import math

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.device import device_info, simulate_launches
from rapid_llm.kernels.ops.tile_policy import Tile
from tests import reference
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to

E4M3 = torch.float8_e4m3fn
EPS = 1e-5
CASES = [
    pytest.param(1, 576, 576, id="decode-single-token"),
    pytest.param(7, 1000, 128, id="ragged-width"),
    pytest.param(3, 1025, 1025, id="one-past-a-tile"),
    pytest.param(3, 1025, 128, id="one-past-a-group"),
]


def native(op):
    """The Triton rows among those that this machine runs."""
    return [row for row in each_row_of(op).args[1] if "triton" in row.values[0].spec.requires.packages]


def buffers(tokens, d, group, device):
    """Columns of a buffer of bytes, and scales that lie by columns, as a view; with what they lie in."""
    buffer = torch.full((tokens, d + 9), 0x11, dtype=torch.uint8, device=device)
    by_columns = torch.full((-(-d // group) + 1, tokens), 7.0, device=device)
    scales = by_columns[0] if group == d else by_columns[:-1].t()
    return buffer, by_columns, buffer[:, 3 : d + 3].view(E4M3), scales


def assert_only_columns_written(buffer, by_columns, d):
    assert (buffer[:, :3] == 0x11).all()
    assert (buffer[:, d + 3 :] == 0x11).all()
    assert (by_columns[-1] == 7.0).all()


def assert_quantised(out, scales, numbers, expected_scales):
    """Half a step of e4m3, and what fp32 maths may be off before it."""
    torch.testing.assert_close(scales.double().view_as(expected_scales), expected_scales, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.float().double(), numbers, rtol=2**-4 + 2e-5, atol=2**-10 + 2e-5, equal_nan=True)


@each_row_of("add_rms_norm_fp8")
def test_add_rms_norm_fp8_holds_over_its_whole_sweep(add_rms_norm_fp8, device):
    assert broken_cases(add_rms_norm_fp8, device) == []


@each_row_of("swiglu_fp8")
def test_swiglu_fp8_holds_over_its_whole_sweep(swiglu_fp8, device):
    assert broken_cases(swiglu_fp8, device) == []


@pytest.mark.case("G11")
@each_row_of("add_rms_norm_fp8")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "d", "group"), CASES)
def test_add_rms_norm_fp8_reads_strided_views_and_writes_its_columns_only(add_rms_norm_fp8, num_tokens, d, group, dtype, device):
    x, fused = (torch.randn(num_tokens, d + 9, device=device).to(dtype) for _ in range(2))
    x, residual = x[:, 1 : d + 1], fused[:, 2 : d + 2]
    before, weight = fused.clone(), torch.randn(d + 1, device=device).to(dtype)[1:]
    expected_residual, *expected = reference.add_rms_norm_fp8(x, residual, weight, eps=EPS, group=group)
    buffer, by_columns, out, scales = buffers(num_tokens, d, group, device)

    assert add_rms_norm_fp8(x, residual, weight, out=out, scales=scales, eps=EPS) is out

    assert torch.equal(residual.double(), expected_residual)
    assert torch.equal(fused[:, :2], before[:, :2])
    assert torch.equal(fused[:, d + 2 :], before[:, d + 2 :])
    assert_quantised(out, scales, *expected)
    assert_only_columns_written(buffer, by_columns, d)


@pytest.mark.case("G11")
@each_row_of("swiglu_fp8")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "d", "group"), CASES)
def test_swiglu_fp8_reads_strided_views_and_writes_its_columns_only(swiglu_fp8, num_tokens, d, group, dtype, device):
    gate_up = (3 * torch.randn(num_tokens, 2 * d + 9, device=device)).to(dtype)[:, 1 : 2 * d + 1]
    buffer, by_columns, out, scales = buffers(num_tokens, d, group, device)
    assert swiglu_fp8(gate_up, out=out, scales=scales) is out
    assert_quantised(out, scales, *reference.swiglu_fp8(gate_up, group=group))
    assert_only_columns_written(buffer, by_columns, d)


@pytest.mark.case("F1")
@each_row_of("add_rms_norm_fp8")
@each_row_of("swiglu_fp8")
@pytest.mark.parametrize("group", [33_001, 128])
def test_a_row_wider_than_registers_hold_is_walked(add_rms_norm_fp8, swiglu_fp8, group, device):
    """The sanitizer wants a barrier between the residual's store and its load."""
    x, residual, weight = (torch.randn(rows, 33_001, device=device).bfloat16() for rows in (2, 2, 1))
    expected_residual, *expected = reference.add_rms_norm_fp8(x, residual, weight[0], eps=EPS, group=group)
    _, _, out, scales = buffers(2, 33_001, group, device)
    add_rms_norm_fp8(x, residual, weight[0], out=out, scales=scales, eps=EPS)
    assert torch.equal(residual.double(), expected_residual)
    assert_quantised(out, scales, *expected)

    gate_up = torch.cat([x, residual], dim=1)
    swiglu_fp8(gate_up, out=out, scales=scales)
    assert_quantised(out, scales, *reference.swiglu_fp8(gate_up, group=group))


@pytest.mark.parametrize("add_rms_norm_fp8", native("add_rms_norm_fp8"))
@pytest.mark.parametrize("tile", [Tile(BLOCK_N=64), Tile(BLOCK_N=128), Tile(BLOCK_N=256), Tile(BLOCK_N=1024)], ids=str)
@pytest.mark.parametrize("group", [700, 128])
@pytest.mark.parametrize("card", ["h200", "l40s"])
def test_any_tile_norms_and_scales_whole_rows(add_rms_norm_fp8, card, group, tile, device, monkeypatch):
    """On an l40s Triton 3.6 rounds twice, so that the kernel rounds before it casts."""
    name = add_rms_norm_fp8.spec.target.partition(":")[0]
    monkeypatch.setattr(importlib.import_module(name), "resolve_tiles", lambda *_, **__: tile)
    x, residual, weight = (torch.randn(rows, 700, device=device) for rows in (3, 3, 1))
    _, *expected = reference.add_rms_norm_fp8(x, residual, weight[0], eps=EPS, group=group)
    _, _, out, scales = buffers(3, 700, group, device)
    with simulate_launches(device_info(card)):
        add_rms_norm_fp8(x, residual, weight[0], out=out, scales=scales, eps=EPS)
    assert_quantised(out, scales, *expected)


@pytest.mark.parametrize("swiglu_fp8", native("swiglu_fp8"))
@pytest.mark.parametrize("tile", [Tile(1, 64), Tile(4, 256), Tile(32, 1024)], ids=str)
@pytest.mark.parametrize("group", [700, 128])
def test_any_tile_gates_and_scales_whole_rows(swiglu_fp8, group, tile, device, monkeypatch):
    name = swiglu_fp8.spec.target.partition(":")[0]
    monkeypatch.setattr(importlib.import_module(name), "resolve_tiles", lambda *_, **__: tile)
    gate_up = torch.randn(9, 1400, device=device)
    _, _, out, scales = buffers(9, 700, group, device)
    swiglu_fp8(gate_up, out=out, scales=scales)
    assert_quantised(out, scales, *reference.swiglu_fp8(gate_up, group=group))


@pytest.mark.case("E2")
@each_row_of("add_rms_norm_fp8")
@each_row_of("swiglu_fp8")
@pytest.mark.parametrize("group", [200, 128])
def test_rows_of_zeros_keep_finite_scales_above_zero(add_rms_norm_fp8, swiglu_fp8, group, device):
    _, _, out, scales = buffers(2, 200, group, device)
    x, residual, gate_up = (torch.zeros(2, width, device=device) for width in (200, 200, 400))
    weight = torch.ones(200, device=device)
    for call in (
        lambda: add_rms_norm_fp8(x, residual, weight, out=out, scales=scales, eps=EPS),
        lambda: swiglu_fp8(gate_up, out=out, scales=scales),
    ):
        out.view(torch.uint8).fill_(0x11)
        scales.fill_(math.nan)
        call()
        assert (out.view(torch.uint8) == 0).all()
        assert scales.isfinite().all()
        assert (scales > 0).all()


@pytest.mark.case("G13")
@each_row_of("add_rms_norm_fp8")
@each_row_of("swiglu_fp8")
def test_no_tokens_are_nothing(add_rms_norm_fp8, swiglu_fp8, device):
    x, out = torch.empty(0, 200, device=device), torch.empty(0, 200, dtype=E4M3, device=device)
    for scales in (torch.empty(0, device=device), torch.empty(0, 2, device=device)):
        assert add_rms_norm_fp8(x, x, torch.ones(200, device=device), out=out, scales=scales, eps=EPS) is out
        assert swiglu_fp8(torch.empty(0, 400, device=device), out=out, scales=scales) is out


OUT = {"out": torch.zeros(3, 200, dtype=torch.uint8).view(E4M3), "scales": torch.zeros(3)}
NORM = {"x": torch.ones(3, 200), "residual": torch.zeros(3, 200), "weight": torch.ones(200), **OUT, "eps": EPS}
GATE = {"gate_up": torch.ones(3, 400), **OUT}
SHARED_REFUSALS = [
    pytest.param({"out": torch.zeros(3, 200, dtype=torch.uint8)}, id="out-of-bytes"),
    pytest.param({"out": torch.zeros(2, 200, dtype=torch.uint8).view(E4M3)}, id="out-tokens"),
    pytest.param({"out": torch.zeros(200, 3, dtype=torch.uint8).t().view(E4M3)}, id="transposed-out"),
    pytest.param({"scales": torch.zeros(2)}, id="scales-of-other-tokens"),
    pytest.param({"scales": torch.zeros(3, 3)}, id="scales-of-other-groups"),
    pytest.param({"scales": torch.zeros(3).half()}, id="scales-of-another-dtype"),
]


def refused(row, arguments, device):
    moved = {name: to(device, value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    with pytest.raises(KernelInputError, match=row.spec.op):
        row(**moved)
    assert (moved["out"].view(torch.uint8) == 0).all()
    assert (moved.get("residual", moved["scales"]) == 0).all()


@each_row_of("add_rms_norm_fp8")
@pytest.mark.parametrize(
    "changed",
    [
        *SHARED_REFUSALS,
        pytest.param({"x": torch.ones(3, 400)[:, ::2]}, id="every-other-column"),
        pytest.param({"weight": torch.ones(199)}, id="weight-width"),
        pytest.param({"residual": torch.zeros(3, 200).half()}, id="mixed-dtypes"),
        pytest.param({"residual": torch.zeros(200, 3).t()}, id="transposed-residual"),
    ],
)
def test_add_rms_norm_fp8_refuses_what_it_would_misread(add_rms_norm_fp8, changed, device):
    refused(add_rms_norm_fp8, {**NORM, **changed}, device)


@each_row_of("swiglu_fp8")
@pytest.mark.parametrize(
    "changed",
    [
        *SHARED_REFUSALS,
        pytest.param({"gate_up": torch.ones(3, 800)[:, ::2]}, id="every-other-column"),
        pytest.param({"gate_up": torch.ones(3, 200)}, id="one-half-only"),
        pytest.param({"gate_up": torch.ones(3, 400).int()}, id="integers"),
    ],
)
def test_swiglu_fp8_refuses_what_it_would_misread(swiglu_fp8, changed, device):
    refused(swiglu_fp8, {**GATE, **changed}, device)
