"""quantize_fp8 and fp8_gemm against their float64 twins, on every row that this machine runs."""

import importlib
import math

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.device import device_info, simulate_launches
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.ops.quantization import fp8_library
from rapid_llm.kernels.ops.tile_policy import Tile
from rapid_llm.kernels.verify.case import compare
from rapid_llm.kernels.verify.quantization.fp8 import bytes_of, product_check
from tests import reference
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to

E4M3 = torch.float8_e4m3fn
LEAST_SCALE = torch.finfo(torch.float32).tiny
CASES = [
    pytest.param(1, 64, 256, id="decode-single-token"),
    pytest.param(7, 100, 97, id="ragged-width"),
    pytest.param(65, 33, 160, id="one-past-a-tile"),
]
LAYOUTS = [
    pytest.param((1,), (1,), id="tensor-tensor"),
    pytest.param(("t",), ("n",), id="token-output"),
    pytest.param(("t", 1), ("n", 1), id="columns"),
    pytest.param((1,), ("n",), id="tensor-output"),
    pytest.param(("t",), (1,), id="token-tensor"),
    pytest.param(("t", "g"), ("b", "g"), id="blocks"),
    pytest.param(("t", "g"), ("n", "g"), id="blocks-of-one-output"),
]


def native(op):
    """The Triton rows among those that this machine runs."""
    return [row for row in each_row_of(op).args[1] if "triton" in row.values[0].spec.requires.packages]


def quantised(quantize_fp8, x, shape=None, **others):
    """Bytes and scales of ``x``, with scales of ``shape``, one a token if None."""
    out = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scales = others.pop("scales", None)
    scales = torch.full(shape or x.shape[:1], math.nan, device=x.device) if scales is None else scales
    assert quantize_fp8(x, out=out, scales=scales, **others) is out
    return out.view(torch.uint8), scales


def numbers(*shape, device):
    """e4m3 numbers as a quantiser leaves them."""
    return (100 * torch.randn(*shape, device=device)).clamp(-448, 448).to(E4M3)


def scales_of(shape, device, **sizes):
    """Scales of a shape of ``t`` tokens, ``n`` outputs, ``g`` groups and ``b`` blocks; neighbours are 32 times apart."""
    scales = (0.5 + torch.rand([sizes.get(size, size) for size in shape], device=device)) / 448
    scales.view(-1)[::2] /= 32
    return scales


def assert_product(out, x, weight, x_scales, weight_scales, bias=None):
    """As the cases of verify hold it: a rounding, fp32 sums, and what a GPU's matrix unit drops."""
    expected = reference.fp8_gemm(x, weight, x_scales, weight_scales, bias=bias)
    wide = (reference.dequantised(values, scales) for values, scales in ((x, x_scales), (weight, weight_scales)))
    assert compare(product_check(out, expected, *wide, matrix_unit=2.0**-7)).problem == ""


@each_row_of("quantize_fp8")
def test_quantize_fp8_holds_over_its_whole_sweep(quantize_fp8, device):
    assert broken_cases(quantize_fp8, device) == []


@each_row_of("fp8_gemm")
def test_fp8_gemm_holds_over_its_whole_sweep(fp8_gemm, device):
    assert broken_cases(fp8_gemm, device) == []


# ---- quantize_fp8


@pytest.mark.case("E6")
@each_row_of("quantize_fp8")
@pytest.mark.parametrize("card", ["h200", "l40s"])
def test_every_number_and_every_midpoint_is_rounded_as_torch_does(quantize_fp8, card, device):
    """Each number, what lies halfway to the next, and its neighbours in fp32. Triton 3.6 casts through fp16 on sm89."""
    every = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    halfway = (every[1:] + every[:-1]) / 2
    beside = [torch.nextafter(halfway, torch.tensor(towards)) for towards in (-math.inf, math.inf)]
    positive = torch.cat([every, halfway, *beside, torch.tensor([2.0**-10 + 2.0**-30, 1e-40, 447.9999])])
    x = torch.cat([positive, -positive, torch.tensor([math.nan])])[None].to(device)

    with simulate_launches(device_info(card)):
        bytes_, _ = quantised(quantize_fp8, x, scales=torch.ones(1, device=device), static=True)

    expected = x.clamp(-448, 448).to(E4M3).view(torch.uint8)
    assert torch.equal(bytes_, expected)


@pytest.mark.case("E4")
@each_row_of("quantize_fp8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_past_448_saturate_and_what_is_not_finite_is_nan(quantize_fp8, dtype, device):
    inside, past, lost = [448.0, -448.0], [449.0, 464.0, 465.0, 480.0, 1e4, -1e4], [math.inf, -math.inf, math.nan]
    x = torch.tensor([inside + past + lost], device=device).to(dtype)
    bytes_, scales = quantised(quantize_fp8, x, scales=torch.ones(1, device=device), static=True)
    assert bytes_.tolist() == [[0x7E, 0xFE, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0x7F]]
    assert scales.tolist() == [1.0]


@pytest.mark.case("E4")
@each_row_of("quantize_fp8")
@pytest.mark.parametrize("shape", [None, (2, 2)], ids=["token", "groups"])
def test_what_is_not_finite_changes_no_other_number(quantize_fp8, shape, device):
    x = torch.randn(2, 200, device=device)
    spoilt = x.clone()
    x[:, ::50] = 0
    spoilt[:, 0::100], spoilt[:, 50::100] = math.nan, math.inf
    (clean, clean_scales), (bytes_, scales) = quantised(quantize_fp8, x, shape), quantised(quantize_fp8, spoilt, shape)
    assert torch.equal(scales, clean_scales)
    assert (bytes_[:, ::50] == 0x7F).all()
    bytes_[:, ::50] = 0
    assert torch.equal(bytes_, clean)


@pytest.mark.case("E2")
@each_row_of("quantize_fp8")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [None, (4, 2)], ids=["token", "groups"])
def test_rows_of_zeros_and_of_tiny_values_keep_finite_scales_above_zero(quantize_fp8, shape, dtype, device):
    rows = torch.tensor([[0.0], [1e-30], [1e-40], [1e-45]], device=device)
    x = (rows * torch.linspace(-1, 1, 200, device=device)).to(dtype)
    bytes_, scales = quantised(quantize_fp8, x, shape)

    expected, expected_scales = reference.quantize_fp8(x, group=128 if shape else None)
    assert scales.isfinite().all()
    assert (scales >= LEAST_SCALE).all()
    assert torch.equal(scales.double().view_as(expected_scales), expected_scales)
    assert torch.equal(bytes_, bytes_of(expected))
    assert (bytes_[0] & 0x7F == 0).all()  # zeros of either sign
    if dtype != torch.float16:
        values = reference.dequantised(bytes_[1:2].view(E4M3), scales[1:2])
        torch.testing.assert_close(values, x[1:2].double(), rtol=2**-4, atol=1e-33)


@pytest.mark.case("E2")
@pytest.mark.case("G13")
@each_row_of("quantize_fp8")
@pytest.mark.parametrize("shape", [(0,), (0, 2), (1,)], ids=["token", "groups", "static"])
def test_quantize_fp8_of_no_tokens_launches_nothing(quantize_fp8, shape, device, monkeypatch):
    forbid_launches(quantize_fp8, monkeypatch, "_quantize_rows_kernel", "_quantize_groups_kernel")
    quantised(quantize_fp8, torch.empty(0, 200, device=device), shape, static=shape == (1,))


@pytest.mark.case("B2")
@each_row_of("quantize_fp8")
@pytest.mark.parametrize("rows", [4 * 16_385, 65_536])
@pytest.mark.parametrize("grouped", [False, True], ids=["token", "groups"])
def test_more_rows_than_a_grid_axis_holds_are_quantised(quantize_fp8, rows, grouped, device):
    """65,540 of them. Interpreted kernels would take minutes: of those the grid alone is checked, by tests/compile."""
    if "triton" in quantize_fp8.spec.requires.packages and device.type == "cpu":
        pytest.skip("kernels are interpreted here")
    x = torch.randn(rows, 128, device=device).bfloat16()
    bytes_, scales = quantised(quantize_fp8, x, (rows, 1) if grouped else None)
    expected, expected_scales = reference.quantize_fp8(x[-5:])
    assert torch.equal(bytes_[-5:], bytes_of(expected))
    assert torch.equal(scales[-5:].double().view(5, 1), expected_scales)
    assert scales.isfinite().all()


@pytest.mark.case("F1")
@each_row_of("quantize_fp8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_wider_than_registers_hold_is_read_twice_and_written_once(quantize_fp8, dtype, device):
    """The sanitizer sees every load of what was stored; the second walk reads x again, and nothing that the first one wrote."""
    x = torch.randn(2, 33_001, device=device).to(dtype)
    bytes_, scales = quantised(quantize_fp8, x)
    expected, expected_scales = reference.quantize_fp8(x)
    assert torch.equal(bytes_, bytes_of(expected))
    assert torch.equal(scales.double(), expected_scales[:, 0])


@pytest.mark.case("G11")
@each_row_of("quantize_fp8")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["token", "groups", "static"])
@pytest.mark.parametrize(("num_tokens", "k"), [(1, 256), (7, 97), (33, 300)])
def test_quantize_fp8_reads_strided_views_and_writes_its_columns_only(quantize_fp8, num_tokens, k, kind, dtype, device):
    groups, group = -(-k // 128), 128 if kind == "groups" else None
    x = torch.randn(num_tokens, k + 9, device=device).to(dtype)[:, 1 : k + 1]
    buffer = torch.full((num_tokens, k + 9), 0x11, dtype=torch.uint8, device=device)
    given = torch.full((1,), 0.01, device=device)
    by_columns = torch.full((groups + 1, num_tokens), 7.0, device=device)  # as a product that is fed by columns wants them
    scales = {"token": by_columns[0], "groups": by_columns[:groups].t(), "static": given}[kind]

    quantize_fp8(x, out=buffer[:, 3 : k + 3].view(E4M3), scales=scales, static=kind == "static")

    expected, expected_scales = reference.quantize_fp8(x, group=group, scale=given if kind == "static" else None)
    assert torch.equal(buffer[:, 3 : k + 3], bytes_of(expected))
    assert (buffer[:, :3] == 0x11).all()
    assert (buffer[:, k + 3 :] == 0x11).all()
    if kind != "static":
        assert torch.equal(scales.double().view_as(expected_scales), expected_scales)
        assert (by_columns[groups:] == 7.0).all() if kind == "groups" else (by_columns[1:] == 7.0).all()


ONES = {"x": torch.ones(3, 200), "out": torch.zeros(3, 200, dtype=torch.uint8).view(E4M3), "scales": torch.zeros(3)}


@each_row_of("quantize_fp8")
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"x": torch.ones(3, 400)[:, ::2]}, id="every-other-column"),
        pytest.param({"x": torch.ones(3, 200).int()}, id="integers"),
        pytest.param({"x": torch.ones(600)}, id="flat"),
        pytest.param({"x": torch.ones(3, 0), "out": torch.zeros(3, 0, dtype=torch.uint8).view(E4M3)}, id="no-columns"),
        pytest.param({"out": torch.zeros(3, 200, dtype=torch.uint8)}, id="out-of-bytes"),
        pytest.param({"out": torch.zeros(2, 200, dtype=torch.uint8).view(E4M3)}, id="out-tokens"),
        pytest.param({"out": torch.zeros(200, 3, dtype=torch.uint8).t().view(E4M3)}, id="transposed-out"),
        pytest.param({"scales": torch.zeros(2)}, id="scales-of-other-tokens"),
        pytest.param({"scales": torch.zeros(3, 3)}, id="scales-of-other-groups"),
        pytest.param({"scales": torch.zeros(3).half()}, id="scales-of-another-dtype"),
        pytest.param({"scales": torch.zeros(1)}, id="one-scale-that-is-not-given"),
        pytest.param({"static": True}, id="a-given-scale-for-each-token"),
    ],
)
def test_quantize_fp8_refuses_what_it_would_misread(quantize_fp8, changed, device):
    moved = {name: to(device, value) if isinstance(value, torch.Tensor) else value for name, value in {**ONES, **changed}.items()}
    with pytest.raises(KernelInputError, match=r"quantize_fp8\(x \["):
        quantize_fp8(**moved)
    assert (moved["out"].view(torch.uint8) == 0).all()


# ---- fp8_gemm


@pytest.mark.case("G11")
@each_row_of("fp8_gemm")
@pytest.mark.parametrize(("x_shape", "weight_shape"), LAYOUTS)
@pytest.mark.parametrize(("num_tokens", "n", "k"), CASES)
def test_fp8_gemm_reads_strided_views_and_writes_its_columns_only(fp8_gemm, num_tokens, n, k, x_shape, weight_shape, device):
    sizes = {"t": num_tokens, "n": n, "g": -(-k // 128), "b": -(-n // 128)}
    x, weight = numbers(num_tokens, k + 9, device=device)[:, 1 : k + 1], numbers(n, k + 7, device=device)[:, 3 : k + 3]
    x_scales, weight_scales = (scales_of(shape, device, **sizes) for shape in (x_shape, weight_shape))
    if x_scales.dim() == 2:
        x_scales, weight_scales = (scales.t().clone().t() for scales in (x_scales, weight_scales))
    bias = torch.randn(n + 1, device=device).bfloat16()[1:]
    buffer = torch.full((num_tokens, n + 9), 7.0, dtype=torch.bfloat16, device=device)

    fp8_gemm(x, weight, x_scales, weight_scales, out=buffer[:, :n], bias=bias)

    assert_product(buffer[:, :n], x, weight, x_scales, weight_scales, bias)
    assert (buffer[:, n:] == 7.0).all()


@each_row_of("fp8_gemm")
@pytest.mark.parametrize("shapes", [(("t",), ("n",)), (("t", "g"), ("b", "g")), (("t", "g"), ("n", "g"))], ids=str)
def test_scales_meet_the_numbers_that_they_belong_to(fp8_gemm, shapes, device):
    """One number of k at a time is 1: scales of 600 columns are 5 groups, of 300 outputs 3 blocks, the last ones short."""
    weight, x = torch.ones(300, 600, device=device).to(E4M3), torch.zeros(16, 600, device=device)
    x[torch.arange(16), 37 * torch.arange(16) + 40] = 1
    x = x.to(E4M3)
    sizes = {"t": x.shape[0], "n": 300, "g": 5, "b": 3}
    x_scales, weight_scales = (1 + torch.rand([sizes[size] for size in shape], device=device) for shape in shapes)
    out = fp8_gemm(x, weight, x_scales, weight_scales, out=torch.empty(x.shape[0], 300, device=device))
    torch.testing.assert_close(out.double(), reference.fp8_gemm(x, weight, x_scales, weight_scales), rtol=4e-7, atol=0)


@each_row_of("fp8_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_of_a_weight_and_of_x_is_read_exactly(fp8_gemm, dtype, device):
    """One number a row, times one: subnormals, both zeros and both NaNs come out as they are, from either side."""
    every = torch.zeros(256, 16, dtype=torch.uint8, device=device)
    every[:, 0] = torch.arange(256, device=device)
    every, one = every.view(E4M3), torch.zeros(1, 16, device=device)
    one[0, 0] = 1
    expected = every[:, 0].float().to(dtype)
    ones = torch.ones(1, device=device)
    for x, weight in ((one.to(E4M3), every), (every, one.to(E4M3))):
        out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=device)
        fp8_gemm(x, weight, ones, ones, out=out)
        torch.testing.assert_close(out.view(-1), expected, rtol=0, atol=0, equal_nan=True)


@each_row_of("fp8_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 65])
def test_sums_are_kept_in_fp32(fp8_gemm, num_tokens, dtype, device):
    """16,384 ones and a sixteenth: a bf16 sum of ones stops at 256, one of 13 bits behind the point at 8,192."""
    x, weight = (torch.ones(rows, 16_384 + 128, device=device) for rows in (num_tokens, 3))
    x[:, 16_384:] = 0
    x[:, -1] = 16
    ones, out = torch.ones(1, device=device), torch.empty(num_tokens, 3, dtype=dtype, device=device)
    fp8_gemm(x.to(E4M3), weight.to(E4M3), ones, ones, out=out)
    assert torch.equal(out, torch.full_like(out, 16_400.0))


@pytest.mark.parametrize("fp8_gemm", native("fp8_gemm"))
@pytest.mark.parametrize("tile", [Tile(16, 16, 32), Tile(16, 64, 256), Tile(64, 16, 64), Tile(64, 32, 256)], ids=str)
@pytest.mark.parametrize(("x_shape", "weight_shape"), [LAYOUTS[1], *LAYOUTS[5:]])
def test_any_tile_keeps_scales_apart_and_the_last_tile_is_written(fp8_gemm, x_shape, weight_shape, tile, device, monkeypatch):
    """A tile from a store or a search may cut a group or hold several; 140 tokens are 9 tiles of 16, a group of 8 and one."""
    monkeypatch.setattr(importlib.import_module(fp8_gemm.spec.target.partition(":")[0]), "resolve_tiles", lambda *_, **__: tile)
    tokens, n, k = (140, 20, 96) if x_shape == ("t",) else (20, 150, 320)
    x, weight = numbers(tokens, k, device=device), numbers(n, k, device=device)
    sizes = {"t": tokens, "n": n, "g": 3, "b": 2}
    x_scales, weight_scales = (scales_of(shape, device, **sizes) for shape in (x_shape, weight_shape))
    out = torch.full((tokens, n), math.nan, device=device)
    assert_product(fp8_gemm(x, weight, x_scales, weight_scales, out=out), x, weight, x_scales, weight_scales)


@pytest.mark.parametrize("quantize_fp8", native("quantize_fp8"))
@pytest.mark.parametrize("tile", [Tile(1, 128), Tile(4, 64, num_warps=1), Tile(64, 256)], ids=str)
@pytest.mark.parametrize("group", [128, 700])
def test_any_tile_quantises_every_row(quantize_fp8, tile, group, device, monkeypatch):
    name = quantize_fp8.spec.target.partition(":")[0]
    monkeypatch.setattr(importlib.import_module(name), "resolve_tiles", lambda *_, **__: tile)
    x = torch.randn(9, 700, device=device)
    expected, expected_scales = reference.quantize_fp8(x, group=group)
    bytes_, scales = quantised(quantize_fp8, x, tuple(expected_scales.shape))
    assert torch.equal(bytes_, bytes_of(expected))
    assert torch.equal(scales.double(), expected_scales)


@each_row_of("fp8_gemm")
def test_a_nan_spoils_its_own_token_only(fp8_gemm, device):
    x = numbers(4, 192, device=device)
    x.view(torch.uint8)[1, 5], x.view(torch.uint8)[3, 7] = 0x7F, 0xFF
    ones = torch.ones(1, device=device)
    out = fp8_gemm(x, numbers(33, 192, device=device), ones, ones, out=torch.empty(4, 33, device=device))
    assert out[0::2].isfinite().all()
    assert out[1::2].isnan().all()


@pytest.mark.case("G13")
@each_row_of("fp8_gemm")
def test_fp8_gemm_of_no_tokens_launches_nothing(fp8_gemm, device, monkeypatch):
    forbid_launches(fp8_gemm, monkeypatch, "_fp8_gemm_kernel")
    out = torch.empty(0, 5, device=device)
    x, weight = numbers(0, 64, device=device), numbers(5, 64, device=device)
    assert fp8_gemm(x, weight, torch.empty(0, device=device), torch.ones(5, device=device), out=out) is out


def forbid_launches(row, monkeypatch, *kernels):
    """None of these kernels of a Triton row's module can be launched from here on."""
    if "triton" in row.spec.requires.packages:
        load_target(row.spec)
        for kernel in kernels:
            monkeypatch.setattr(importlib.import_module(row.spec.target.partition(":")[0]), kernel, None)


FEW = {
    "x": torch.ones(3, 200).to(E4M3),
    "weight": torch.ones(150, 200).to(E4M3),
    "x_scales": torch.ones(3),
    "weight_scales": torch.ones(150),
    "out": torch.zeros(3, 150),
    "bias": None,
}


@each_row_of("fp8_gemm")
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"x": torch.ones(3, 200)}, id="x-of-floats"),
        pytest.param({"x": torch.ones(3, 400).to(E4M3)[:, ::2]}, id="every-other-column"),
        pytest.param({"x": torch.ones(3, 100).to(E4M3)}, id="x-of-another-k"),
        pytest.param({"weight": torch.ones(150, 200, dtype=torch.int8)}, id="weight-of-integers"),
        pytest.param({"weight": torch.ones(200, 150).to(E4M3).t()}, id="transposed-weight"),
        pytest.param({"x_scales": torch.ones(4)}, id="scales-of-other-tokens"),
        pytest.param({"x_scales": torch.ones(3).half()}, id="scales-of-another-dtype"),
        pytest.param({"weight_scales": torch.ones(149)}, id="scales-of-other-outputs"),
        pytest.param({"weight_scales": torch.ones(2, 2)}, id="blocks-beside-one-scale-a-token"),
        pytest.param({"x_scales": torch.ones(3, 2)}, id="groups-beside-one-scale-an-output"),
        pytest.param({"x_scales": torch.ones(3, 2), "weight_scales": torch.ones(2, 3)}, id="blocks-of-another-width"),
        pytest.param({"x_scales": torch.ones(3, 2), "weight_scales": torch.ones(3, 2)}, id="blocks-of-another-height"),
        pytest.param({"out": torch.zeros(150, 3).t()}, id="transposed-out"),
        pytest.param({"out": torch.zeros(3, 150).double()}, id="out-of-doubles"),
        pytest.param({"bias": torch.ones(149)}, id="short-bias"),
        pytest.param({"bias": torch.ones(150).half()}, id="bias-of-another-dtype"),
        pytest.param({"bias": torch.ones(300)[::2]}, id="strided-bias"),
    ],
)
def test_fp8_gemm_refuses_what_it_would_misread(fp8_gemm, changed, device):
    moved = {name: None if value is None else to(device, value) for name, value in {**FEW, **changed}.items()}
    with pytest.raises(KernelInputError, match=r"fp8_gemm\(x \["):
        fp8_gemm(**moved)
    assert (moved["out"] == 0).all()


@pytest.fixture
def library(monkeypatch):
    """What the library is called with; it multiplies in float64."""
    calls = []

    def multiply(x, weight, x_scales, weight_scales, bias, *, out_dtype, use_fast_accum, out):
        assert not use_fast_accum
        assert out_dtype == out.dtype == torch.bfloat16
        calls.append((tuple(x_scales.shape), tuple(weight_scales.shape)))
        product = (x.float().double() * x_scales) @ (weight.float().double() * weight_scales)
        return out.copy_(product if bias is None else product + bias)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    return calls


@pytest.mark.parametrize(
    ("x_shape", "weight_shape", "told"),
    [
        pytest.param((1,), (1,), ((1,), (1,)), id="tensor-tensor"),
        pytest.param((33,), (64,), ((33, 1), (1, 64)), id="token-output"),
        pytest.param((33, 1), (64, 1), ((33, 1), (1, 64)), id="columns"),
        pytest.param((1,), (64,), ((33, 1), (1, 64)), id="tensor-output"),
        pytest.param((33,), (1,), ((33, 1), (1, 64)), id="token-tensor"),
    ],
)
def test_the_library_is_given_the_scales_that_it_takes(library, x_shape, weight_shape, told):
    x, weight = numbers(33, 160, device="cpu"), numbers(64, 160, device="cpu")
    x_scales, weight_scales, bias = torch.rand(x_shape) / 448, torch.rand(weight_shape) / 448, torch.randn(64).bfloat16()
    out = torch.empty(33, 64, dtype=torch.bfloat16)
    fp8_library.fp8_gemm(x, weight, x_scales, weight_scales, out=out, bias=bias)
    assert library == [told]
    assert_product(out, x, weight, x_scales, weight_scales, bias)


@pytest.mark.parametrize(
    ("tokens", "n", "k", "offset", "gap", "grouped", "dtype"),
    [
        pytest.param(3, 64, 168, 0, 0, False, torch.bfloat16, id="k-off-16"),
        pytest.param(3, 60, 160, 0, 0, False, torch.bfloat16, id="n-off-16"),
        pytest.param(3, 64, 160, 1, 0, False, torch.bfloat16, id="address-off-16-bytes"),
        pytest.param(3, 64, 160, 0, 16, False, torch.bfloat16, id="rows-apart"),
        pytest.param(3, 64, 160, 0, 0, True, torch.bfloat16, id="scales-of-groups"),
        pytest.param(3, 64, 160, 0, 0, False, torch.float32, id="fp32"),
        pytest.param(0, 64, 160, 0, 0, False, torch.bfloat16, id="no-tokens"),
    ],
)
def test_what_the_library_does_not_take_is_multiplied_without_it(library, tokens, n, k, offset, gap, grouped, dtype):
    storage = numbers(tokens * (k + gap) + offset, device="cpu")
    x, weight = storage.as_strided((tokens, k), (k + gap, 1), offset), numbers(n, k, device="cpu")
    x_scales, weight_scales = (torch.ones(tokens, 2), torch.ones(1, 2)) if grouped else (torch.ones(tokens), torch.ones(n))
    out = torch.full((tokens, n), math.nan, dtype=dtype)
    fp8_library.fp8_gemm(x, weight, x_scales, weight_scales, out=out)
    assert library == []
    if tokens:
        assert_product(out, x, weight, x_scales, weight_scales)
