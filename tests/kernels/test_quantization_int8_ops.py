"""quantize_int8 and int8_gemm against their float64 twins, on every row that this machine runs."""

import importlib
import math

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.ops.tile_policy import Tile
from tests import reference
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to

LEAST_SCALE = torch.finfo(torch.float32).tiny
CASES = [
    pytest.param(1, 64, 256, id="decode-single-token"),
    pytest.param(7, 100, 97, id="ragged-width"),
    pytest.param(65, 33, 160, id="one-past-a-tile"),
]


def native(op):
    """The Triton rows among those that this machine runs."""
    return [row for row in each_row_of(op).args[1] if "triton" in row.values[0].spec.requires.packages]


def use_tile(row, tile, monkeypatch):
    monkeypatch.setattr(importlib.import_module(row.spec.target.partition(":")[0]), "resolve_tiles", lambda *_, **__: tile)


def quantised(quantize_int8, x, scales=None):
    """Codes and scales of ``x``; by the scale that is given, if one is."""
    out, static = torch.empty(x.shape, dtype=torch.int8, device=x.device), scales is not None
    scales = torch.full(x.shape[:1], math.nan, device=x.device) if scales is None else scales
    assert quantize_int8(x, out=out, scales=scales, static=static) is out
    return out, scales


def codes(*shape, device):
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)


def scales_of(count, device):
    """Neighbours are 32 times apart."""
    scales = (0.5 + torch.rand(count, device=device)) / 127
    scales[::2] /= 32
    return scales


def assert_product(out, expected):
    """Sums are exact: three fp32 roundings, of outputs that a bias may cancel, and one to the dtype of out."""
    rtol = max(1e-6, torch.finfo(out.dtype).eps / 2)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-6 * float(expected.abs().max()))


@each_row_of("quantize_int8")
def test_quantize_int8_holds_over_its_whole_sweep(quantize_int8, device):
    assert broken_cases(quantize_int8, device) == []


@each_row_of("int8_gemm")
def test_int8_gemm_holds_over_its_whole_sweep(int8_gemm, device):
    assert broken_cases(int8_gemm, device) == []


# ---- quantize_int8


@pytest.mark.case("E6")
@each_row_of("quantize_int8")
def test_every_code_and_every_midpoint_is_rounded_to_the_even_one(quantize_int8, device):
    """Each integer, what lies halfway to the next, and its neighbours in fp32; 200 is past the last."""
    every = torch.arange(-127, 128).float()
    halfway = every[1:] - 0.5
    beside = [torch.nextafter(halfway, torch.tensor(towards)) for towards in (-math.inf, math.inf)]
    x = torch.cat([every, halfway, *beside, torch.tensor([127.4, 127.5, 200.0, -127.5, -128.0, 1e30, 1e-40])])[None].to(device)
    out, scales = quantised(quantize_int8, x, torch.ones(1, device=device))
    assert torch.equal(out.float(), x.clamp(-127, 127).round())
    assert scales.tolist() == [1.0]


@pytest.mark.case("E4")
@each_row_of("quantize_int8")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 33_001], ids=["one-tile", "walked"])
def test_what_is_not_finite_shows_in_the_scale_of_its_own_token(quantize_int8, k, dtype, device):
    x = torch.randn(4, k, device=device).to(dtype)
    x[:, 5] = 0
    clean, clean_scales = quantised(quantize_int8, x)
    x[0, 5], x[1, 5], x[2, 5] = math.inf, -math.inf, math.nan
    out, scales = quantised(quantize_int8, x)
    assert scales[:3].isnan().all()
    assert scales[3] == clean_scales[3]
    assert out[:, 5].tolist() == [127, -127, 0, 0]
    out[:, 5] = 0
    assert torch.equal(out, clean)


@pytest.mark.case("E2")
@each_row_of("quantize_int8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_and_of_tiny_values_keep_finite_scales_above_zero(quantize_int8, dtype, device):
    rows = torch.tensor([[0.0], [1e-30], [1e-40], [1e-45]], device=device)
    x = (rows * torch.linspace(-1, 1, 200, device=device)).to(dtype)
    out, scales = quantised(quantize_int8, x)
    expected, expected_scales = reference.quantize_int8(x)
    assert (scales >= LEAST_SCALE).all()
    assert torch.equal(scales.double(), expected_scales)
    assert torch.equal(out.long(), expected)
    assert (out[0] == 0).all()


@pytest.mark.case("E2")
@pytest.mark.case("G13")
@each_row_of("quantize_int8")
@pytest.mark.parametrize("static", [False, True])
def test_quantize_int8_of_no_tokens_launches_nothing(quantize_int8, static, device, monkeypatch):
    forbid_launches(quantize_int8, monkeypatch)
    quantised(quantize_int8, torch.empty(0, 200, device=device), torch.ones(1, device=device) if static else None)


@pytest.mark.case("B2")
@each_row_of("quantize_int8")
@pytest.mark.parametrize("rows", [4 * 16_385, 65_536])
def test_more_rows_than_a_grid_axis_holds_are_quantised(quantize_int8, rows, device):
    """65,540 of them. Interpreted kernels would take minutes: of those the grid alone is checked, by tests/compile."""
    if "triton" in quantize_int8.spec.requires.packages and device.type == "cpu":
        pytest.skip("kernels are interpreted here")
    x = torch.randn(rows, 128, device=device).bfloat16()
    out, scales = quantised(quantize_int8, x)
    expected, expected_scales = reference.quantize_int8(x[-5:])
    assert torch.equal(out[-5:].long(), expected)
    assert torch.equal(scales[-5:].double(), expected_scales)
    assert scales.isfinite().all()


@pytest.mark.case("F1")
@each_row_of("quantize_int8")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("static", [False, True])
def test_a_row_wider_than_registers_hold_is_read_twice_and_written_once(quantize_int8, static, dtype, device):
    """The sanitizer sees every load of what was stored."""
    x = torch.randn(2, 33_001, device=device).to(dtype)
    given = torch.full((1,), 0.02, device=device) if static else None
    out, scales = quantised(quantize_int8, x, given)
    expected, expected_scales = reference.quantize_int8(x, scale=given)
    assert torch.equal(out.long(), expected)
    assert torch.equal(scales.double().expand(2), expected_scales)


@pytest.mark.case("G11")
@each_row_of("quantize_int8")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "k"), [(1, 256), (7, 97), (33, 300)])
def test_quantize_int8_reads_strided_views_and_writes_its_columns_only(quantize_int8, num_tokens, k, dtype, device):
    x = torch.randn(num_tokens, k + 9, device=device).to(dtype)[:, 1 : k + 1]
    buffer = torch.full((num_tokens, k + 9), 99, dtype=torch.int8, device=device)
    wide = torch.full((num_tokens, 3), 7.0, device=device)
    quantize_int8(x, out=buffer[:, 3 : k + 3], scales=wide[:, 1])
    expected, expected_scales = reference.quantize_int8(x)
    assert torch.equal(buffer[:, 3 : k + 3].long(), expected)
    assert torch.equal(wide[:, 1].double(), expected_scales)
    assert (buffer[:, :3] == 99).all()
    assert (buffer[:, k + 3 :] == 99).all()
    assert (wide[:, ::2] == 7.0).all()


@pytest.mark.parametrize("quantize_int8", native("quantize_int8"))
@pytest.mark.parametrize("tile", [Tile(1, 128), Tile(4, 64, num_warps=1), Tile(16, 1024)], ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_any_tile_quantises_every_row(quantize_int8, static, tile, device, monkeypatch):
    use_tile(quantize_int8, tile, monkeypatch)
    x, given = torch.randn(9, 700, device=device), torch.full((1,), 0.02, device=device) if static else None
    out, _ = quantised(quantize_int8, x, given)
    assert torch.equal(out.long(), reference.quantize_int8(x, scale=given)[0])


ONES = {"x": torch.ones(3, 200), "out": torch.zeros(3, 200, dtype=torch.int8), "scales": torch.zeros(3)}


@each_row_of("quantize_int8")
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"x": torch.ones(3, 400)[:, ::2]}, id="every-other-column"),
        pytest.param({"x": torch.ones(3, 200).int()}, id="integers"),
        pytest.param({"x": torch.ones(600)}, id="flat"),
        pytest.param({"x": torch.ones(3, 0), "out": torch.zeros(3, 0, dtype=torch.int8)}, id="no-columns"),
        pytest.param({"out": torch.zeros(3, 200, dtype=torch.uint8)}, id="unsigned-out"),
        pytest.param({"out": torch.zeros(200, 3, dtype=torch.int8).t()}, id="transposed-out"),
        pytest.param({"scales": torch.zeros(2)}, id="scales-of-other-tokens"),
        pytest.param({"scales": torch.zeros(3, 2)}, id="scales-of-groups"),
        pytest.param({"scales": torch.zeros(3).half()}, id="scales-of-another-dtype"),
        pytest.param({"scales": torch.zeros(1)}, id="one-scale-that-is-not-given"),
        pytest.param({"static": True}, id="a-given-scale-for-each-token"),
    ],
)
def test_quantize_int8_refuses_what_it_would_misread(quantize_int8, changed, device):
    refused(quantize_int8, {**ONES, **changed}, device)


def refused(row, arguments, device):
    moved = {name: to(device, value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    with pytest.raises(KernelInputError, match=rf"{row.spec.op}\(x \["):
        row(**moved)
    assert (moved["out"] == 0).all()


# ---- int8_gemm


@pytest.mark.case("G11")
@each_row_of("int8_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("one_scale", [False, True], ids=["token", "tensor"])
@pytest.mark.parametrize(("num_tokens", "n", "k"), CASES)
def test_int8_gemm_reads_strided_views_and_writes_its_columns_only(int8_gemm, num_tokens, n, k, one_scale, dtype, device):
    x, weight = codes(num_tokens, k + 9, device=device)[:, 1 : k + 1], codes(n, k + 7, device=device)[:, 3 : k + 3]
    x_scales = scales_of(2 if one_scale else 2 * num_tokens, device)[::2]
    weight_scales = scales_of(2 * n, device).view(n, 2)[:, 1:]
    bias = torch.randn(n + 1, device=device).to(dtype)[1:]
    buffer = torch.full((num_tokens, n + 9), 7.0, dtype=dtype, device=device)

    int8_gemm(x, weight, x_scales, weight_scales, out=buffer[:, :n], bias=bias)

    assert_product(buffer[:, :n], reference.int8_gemm(x, weight, x_scales, weight_scales, bias=bias))
    assert (buffer[:, n:] == 7.0).all()


@each_row_of("int8_gemm")
def test_sums_are_exact_up_to_the_largest_that_int32_holds(int8_gemm, device):
    """131,056 products of 16,384; and seven terms less of 128 each, which a sum in fp32 would lose."""
    x, weight = (torch.full((rows, 131_056), -128, dtype=torch.int8, device=device) for rows in (1, 2))
    weight[1, :7] = -127
    ones = torch.ones(2, device=device)
    out = int8_gemm(x, weight, ones[:1], ones, out=torch.empty(1, 2, device=device))
    most = 131_056 * 16_384
    assert out.double().tolist() == [[most, float(torch.tensor(most - 7 * 128, dtype=torch.float32))]]


@pytest.mark.parametrize("int8_gemm", native("int8_gemm"))
@pytest.mark.parametrize("tile", [Tile(16, 16, 32), Tile(16, 64, 256), Tile(64, 16, 64)], ids=str)
def test_any_tile_is_right_and_the_last_one_is_written(int8_gemm, tile, device, monkeypatch):
    """140 tokens are 9 tiles of 16: a group of eight and one of one."""
    use_tile(int8_gemm, tile, monkeypatch)
    x, weight = codes(140, 96, device=device), codes(37, 96, device=device)
    x_scales, weight_scales = scales_of(140, device), scales_of(37, device)
    out = torch.full((140, 37), math.nan, device=device)
    assert_product(
        int8_gemm(x, weight, x_scales, weight_scales, out=out), reference.int8_gemm(x, weight, x_scales, weight_scales)
    )


@each_row_of("int8_gemm")
def test_a_scale_that_is_nan_spoils_its_own_token_only(int8_gemm, device):
    x_scales = torch.tensor([1.0, math.nan, 1.0], device=device)
    out = torch.empty(3, 33, device=device)
    int8_gemm(codes(3, 64, device=device), codes(33, 64, device=device), x_scales, torch.ones(33, device=device), out=out)
    assert out[::2].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.case("G13")
@each_row_of("int8_gemm")
def test_int8_gemm_of_no_tokens_launches_nothing(int8_gemm, device, monkeypatch):
    forbid_launches(int8_gemm, monkeypatch)
    out = torch.empty(0, 5, device=device)
    x, weight = codes(0, 64, device=device), codes(5, 64, device=device)
    assert int8_gemm(x, weight, torch.empty(0, device=device), torch.ones(5, device=device), out=out) is out


def forbid_launches(row, monkeypatch):
    """No kernel of a Triton row's module can be launched from here on."""
    if "triton" in row.spec.requires.packages:
        load_target(row.spec)
        monkeypatch.setattr(importlib.import_module(row.spec.target.partition(":")[0]), f"_{row.spec.op}_kernel", None)


FEW = {
    "x": torch.ones(3, 64, dtype=torch.int8),
    "weight": torch.ones(5, 64, dtype=torch.int8),
    "x_scales": torch.ones(3),
    "weight_scales": torch.ones(5),
    "out": torch.zeros(3, 5),
    "bias": None,
}


@each_row_of("int8_gemm")
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"x": torch.ones(3, 64)}, id="x-of-floats"),
        pytest.param({"x": torch.ones(3, 128, dtype=torch.int8)[:, ::2]}, id="every-other-column"),
        pytest.param({"x": torch.ones(3, 32, dtype=torch.int8)}, id="x-of-another-k"),
        pytest.param(
            {"x": torch.ones(3, 131_072, dtype=torch.int8), "weight": torch.ones(5, 131_072, dtype=torch.int8)}, id="long-k"
        ),
        pytest.param({"weight": torch.ones(5, 64, dtype=torch.uint8)}, id="unsigned-weight"),
        pytest.param({"weight": torch.ones(64, 5, dtype=torch.int8).t()}, id="transposed-weight"),
        pytest.param({"x_scales": torch.ones(4)}, id="scales-of-other-tokens"),
        pytest.param({"weight_scales": torch.ones(1)}, id="one-scale-for-all-outputs"),
        pytest.param({"weight_scales": torch.ones(5).half()}, id="scales-of-another-dtype"),
        pytest.param({"out": torch.zeros(5, 3).t()}, id="transposed-out"),
        pytest.param({"out": torch.zeros(3, 5, dtype=torch.int32)}, id="out-of-integers"),
        pytest.param({"bias": torch.ones(4)}, id="short-bias"),
        pytest.param({"bias": torch.ones(10)[::2]}, id="strided-bias"),
    ],
)
def test_int8_gemm_refuses_what_it_would_misread(int8_gemm, changed, device):
    refused(int8_gemm, {**FEW, **changed}, device)
