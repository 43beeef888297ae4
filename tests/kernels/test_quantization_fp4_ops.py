"""4-bit floating-point weights and their quantiser against their float64 twins, on every row that this machine runs."""

import importlib
import math
from contextlib import nullcontext

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.ops.tile_policy import Tile, tiles_by
from tests import reference
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of

CASES = [
    pytest.param(1, 64, 256, id="decode-single-token"),
    pytest.param(7, 100, 96, id="ragged-width"),
    pytest.param(65, 33, 160, id="one-past-a-tile"),
]
E4M3 = torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


TILES = [Tile(16, 16, 32), Tile(16, 32, 64), Tile(64, 16, 256), Tile(32, 64, 128)]


# One token's tile with as many outputs as there are scale bytes to see: fewer programs for an interpreter.
ONE_TOKEN = Tile(1, 64, 64, num_warps=1)

each_at_once = pytest.mark.parametrize("at_once", [pytest.param(1, id="token-by-token"), pytest.param(32, id="at-once")])


def native(op):
    """The Triton rows among those that this machine runs."""
    return [row for row in each_row_of(op).args[1] if "triton" in row.values[0].spec.requires.packages]


def bytes_of(rows, columns, device):
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=device)


def e4m3_of(rows, columns, device):
    """0.5 to 1.875, and neighbours 64 times apart, so that a scale of the wrong group or output shows."""
    scales = bytes_of(rows, columns, device) % 16 + 48
    scales.view(-1)[::2] += 48
    return scales.view(E4M3)


def e8m0_of(rows, columns, device):
    scales = bytes_of(rows, columns, device) % 4 + 120
    scales.view(-1)[::2] += 10
    return scales


def assert_product(out, expected):
    """One rounding to the dtype, and up to 4,096 fp32 additions, each within an eps of outputs that are of the largest's size."""
    largest = float(expected.abs().max())
    rtol = max(1e-6, torch.finfo(out.dtype).eps / 2)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-5 * max(largest, 1e-3))


@each_row_of("nvfp4_gemm")
def test_nvfp4_gemm_holds_over_its_whole_sweep(nvfp4_gemm, device):
    assert broken_cases(nvfp4_gemm, device) == []


@each_row_of("mxfp4_gemm")
def test_mxfp4_gemm_holds_over_its_whole_sweep(mxfp4_gemm, device):
    assert broken_cases(mxfp4_gemm, device) == []


@each_row_of("quantize_nvfp4")
def test_quantize_nvfp4_holds_over_its_whole_sweep(quantize_nvfp4, device):
    assert broken_cases(quantize_nvfp4, device) == []


@pytest.mark.case("G11")
@each_row_of("nvfp4_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "n", "k"), CASES)
def test_nvfp4_gemm_reads_strided_views_and_writes_its_columns_only(nvfp4_gemm, num_tokens, n, k, dtype, device):
    x = torch.randn(num_tokens, k + 9, device=device).to(dtype)[:, 1 : k + 1]
    weight = bytes_of(n, k // 2 + 12, device)[:, 4 : k // 2 + 4]
    scales = e4m3_of(n, k // 16 + 3, device)[:, 1 : k // 16 + 1]
    global_scales = torch.rand(n, 3, device=device)[:, 1] / 64
    bias = torch.randn(n + 1, device=device).to(dtype)[1:]
    buffer = torch.full((num_tokens, n + 9), 7.0, dtype=dtype, device=device)

    nvfp4_gemm(x, weight, scales, global_scales, out=buffer[:, :n], bias=bias)

    assert_product(buffer[:, :n], reference.nvfp4_gemm(x, weight, scales, global_scales, bias=bias))
    assert (buffer[:, n:] == 7.0).all()


@pytest.mark.case("G11")
@each_row_of("mxfp4_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "n", "k"), CASES)
def test_mxfp4_gemm_reads_strided_views_and_writes_its_columns_only(mxfp4_gemm, num_tokens, n, k, dtype, device):
    x = torch.randn(num_tokens, k + 9, device=device).to(dtype)[:, 1 : k + 1] / 64
    weight = bytes_of(n, k // 2 + 12, device)[:, 4 : k // 2 + 4]
    scales = e8m0_of(n, k // 32 + 3, device)[:, 1 : k // 32 + 1]
    bias = torch.randn(n + 1, device=device).to(dtype)[1:]
    buffer = torch.full((num_tokens, n + 9), 7.0, dtype=dtype, device=device)

    mxfp4_gemm(x, weight, scales, out=buffer[:, :n], bias=bias)

    assert_product(buffer[:, :n], reference.mxfp4_gemm(x, weight, scales, bias=bias))
    assert (buffer[:, n:] == 7.0).all()


@pytest.mark.case("G11")
@each_row_of("quantize_nvfp4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "k"), [(1, 16), (7, 1008), (3, 2064)])
def test_quantize_nvfp4_reads_strided_views_and_writes_its_columns_only(quantize_nvfp4, num_tokens, k, dtype, device):
    x = torch.randn(num_tokens, k + 9, device=device).to(dtype)[:, 1 : k + 1]
    codes, scales = (torch.full((num_tokens, width + 5), 99, dtype=torch.uint8, device=device) for width in (k // 2, k // 16))
    global_scale = torch.tensor([0.25], device=device)

    quantize_nvfp4(x, global_scale, out=codes[:, 3 : k // 2 + 3], scales=scales[:, 1 : k // 16 + 1].view(E4M3))

    expected, expected_scales = reference.quantize_nvfp4(x, global_scale)
    assert torch.equal(codes[:, 3 : k // 2 + 3], expected)
    assert torch.equal(scales[:, 1 : k // 16 + 1], expected_scales.view(torch.uint8))
    for buffer, first, last in ((codes, 3, k // 2 + 3), (scales, 1, k // 16 + 1)):
        assert (buffer[:, :first] == 99).all()
        assert (buffer[:, last:] == 99).all()


@pytest.mark.case("E10")
@each_row_of("nvfp4_gemm")
@each_at_once
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_e4m3_scale_with_every_code_is_exact(nvfp4_gemm, dtype, at_once, device):
    """One element of x at a time is 1: subnormal scales, both zeros and both NaNs come out as they are."""
    packed = torch.arange(16, dtype=torch.uint8, device=device).view(8, 2)
    weight = (packed[:, 0] | packed[:, 1] << 4).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8, device=device).view(256, 1).view(E4M3)
    x, out = torch.eye(16, dtype=dtype, device=device), torch.empty(16, 256, dtype=dtype, device=device)
    with tiles_by(lambda *_: ONE_TOKEN) if at_once == 1 else nullcontext():
        for part, target in zip(x.split(at_once), out.split(at_once), strict=True):
            nvfp4_gemm(part, weight, scales, torch.ones(256, device=device), out=target)
    codes = torch.cat((E2M1, -E2M1)).to(device)
    expected = (codes[:, None] * scales.float().T).to(dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.case("E10")
@each_row_of("mxfp4_gemm")
@each_at_once
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_e8m0_scale_with_every_code_is_exact(mxfp4_gemm, dtype, at_once, device):
    """Byte 0 is 2**-127, a subnormal number of fp32, and 255 is NaN; what the dtype of out cannot hold is infinite or 0."""
    packed = torch.arange(16, dtype=torch.uint8, device=device).view(8, 2)
    weight = (packed[:, 0] | packed[:, 1] << 4).repeat(256, 2)
    scales = torch.arange(256, dtype=torch.uint8, device=device).view(256, 1)
    x, out = torch.eye(32, dtype=dtype, device=device), torch.empty(32, 256, dtype=dtype, device=device)
    with tiles_by(lambda *_: ONE_TOKEN) if at_once == 1 else nullcontext():
        for part, target in zip(x.split(at_once), out.split(at_once), strict=True):
            mxfp4_gemm(part, weight, scales, out=target)
    codes = torch.cat((E2M1, -E2M1)).double().to(device).repeat(2)
    expected = codes[:, None] * torch.exp2(scales.T.double() - 127)
    expected[:, 255] = math.nan
    torch.testing.assert_close(out, expected.to(torch.float32).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.case("E10")
@each_row_of("mxfp4_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_smallest_scales_stand_in_one_row(mxfp4_gemm, dtype, device):
    """A scale is never taken off another of its row: beside 2**127 times 0, the smallest counts."""
    weight = torch.full((3, 48), 0x22, dtype=torch.uint8, device=device)  # ones
    scales = torch.tensor([[254, 0, 127], [0, 254, 127], [127, 254, 0]], dtype=torch.uint8, device=device)
    x = torch.zeros(3, 96, dtype=dtype, device=device)
    x[0, 1], x[1, 33], x[2, 65] = 0.25, 0.25, 0.25
    out = mxfp4_gemm(x, weight, scales, out=torch.empty(3, 3, dtype=dtype, device=device))
    expected = torch.exp2(scales.T.double() - 129)
    torch.testing.assert_close(out, expected.to(torch.float32).to(dtype), rtol=0, atol=0)


@pytest.mark.case("E10")
@each_row_of("nvfp4_gemm")
@pytest.mark.parametrize("n", [1, 7, 8, 9])
def test_few_outputs_of_nvfp4_gemm_are_scaled_as_many_are(nvfp4_gemm, n, device):
    x, weight, scales = torch.randn(3, 64, device=device), bytes_of(n, 32, device), e4m3_of(n, 4, device)
    global_scales = torch.rand(n, device=device)
    out = nvfp4_gemm(x, weight, scales, global_scales, out=torch.empty(3, n, device=device))
    assert_product(out, reference.nvfp4_gemm(x, weight, scales, global_scales))


@pytest.mark.case("E10")
@each_row_of("mxfp4_gemm")
@pytest.mark.parametrize("n", [1, 7, 8, 9])
def test_few_outputs_of_mxfp4_gemm_are_scaled_as_many_are(mxfp4_gemm, n, device):
    x, weight, scales = torch.randn(3, 64, device=device), bytes_of(n, 32, device), e8m0_of(n, 2, device)
    out = mxfp4_gemm(x, weight, scales, out=torch.empty(3, n, device=device))
    assert_product(out, reference.mxfp4_gemm(x, weight, scales))


@each_row_of("nvfp4_gemm")
def test_an_infinity_or_a_nan_spoils_its_own_token_only_in_nvfp4_gemm(nvfp4_gemm, device):
    weight, scales = bytes_of(33, 32, device) | 0x11, e4m3_of(33, 4, device)
    spoils_its_own_token(lambda x, out: nvfp4_gemm(x, weight, scales, torch.ones(33, device=device), out=out), device)


@each_row_of("mxfp4_gemm")
def test_an_infinity_or_a_nan_spoils_its_own_token_only_in_mxfp4_gemm(mxfp4_gemm, device):
    weight, scales = bytes_of(33, 32, device) | 0x11, e8m0_of(33, 2, device)
    spoils_its_own_token(lambda x, out: mxfp4_gemm(x, weight, scales, out=out), device)


def spoils_its_own_token(product, device):
    """Of weights without a 0, an infinity leaves infinities and no NaN."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, out = torch.randn(4, 64, device=device).to(dtype) / 64, torch.empty(4, 33, dtype=dtype, device=device)
        x[1, 5], x[3, 7] = math.inf, math.nan
        product(x, out)
        assert out[0::2].isfinite().all()
        assert out[1].isinf().all()
        assert out[3].isnan().all()


@each_row_of("nvfp4_gemm")
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16")])
def test_sums_of_nvfp4_gemm_are_kept_in_fp32(nvfp4_gemm, dtype, device):
    """4,096 times 1: a bf16 sum of ones stops at 256, an fp16 one at 2,048."""
    packed = torch.full((3, 2048), 0x22, dtype=torch.uint8, device=device)
    scales = torch.full((3, 256), 0x38, dtype=torch.uint8, device=device).view(E4M3)
    out = torch.empty(1, 3, dtype=dtype, device=device)
    nvfp4_gemm(torch.ones(1, 4096, dtype=dtype, device=device), packed, scales, torch.ones(3, device=device), out=out)
    assert out.tolist() == [[4096.0] * 3]


@each_row_of("mxfp4_gemm")
def test_fp16_activations_of_mxfp4_gemm_keep_their_bits(mxfp4_gemm, device):
    """11 significant bits, down to the smallest subnormal; a bf16 copy of x has 8."""
    values = [1 + 2.0**-10, 65504.0, -1023 * 2.0**-24, 2.0**-24, math.pi]
    x = torch.zeros(5, 32, dtype=torch.float16, device=device)
    x[:, 3] = torch.tensor(values, device=device)
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8, device=device)
    out = torch.empty(5, 1, dtype=torch.float16, device=device)
    mxfp4_gemm(x, packed, torch.full((1, 1), 127, dtype=torch.uint8, device=device), out=out)
    assert torch.equal(out[:, 0], x[:, 3])


@pytest.mark.parametrize("nvfp4_gemm", native("nvfp4_gemm"))
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_any_tile_keeps_the_groups_of_nvfp4_gemm_apart_and_the_last_tile_is_written(nvfp4_gemm, tile, device, monkeypatch):
    monkeypatch.setattr("rapid_llm.kernels.ops.quantization.fp4_product.resolve_tiles", lambda *_, **__: tile)
    x, weight, scales = torch.randn(300, 176, device=device), bytes_of(37, 88, device), e4m3_of(37, 11, device)
    global_scales, out = torch.rand(37, device=device), torch.full((300, 37), math.nan, device=device)
    nvfp4_gemm(x, weight, scales, global_scales, out=out)
    assert_product(out, reference.nvfp4_gemm(x, weight, scales, global_scales))


@pytest.mark.parametrize("mxfp4_gemm", native("mxfp4_gemm"))
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_any_tile_keeps_the_groups_of_mxfp4_gemm_apart_and_the_last_tile_is_written(mxfp4_gemm, tile, device, monkeypatch):
    monkeypatch.setattr("rapid_llm.kernels.ops.quantization.fp4_product.resolve_tiles", lambda *_, **__: tile)
    x, weight, scales = torch.randn(300, 160, device=device).half(), bytes_of(37, 80, device), e8m0_of(37, 5, device) - 8
    out = torch.full((300, 37), math.nan, device=device).half()
    mxfp4_gemm(x, weight, scales, out=out)
    assert_product(out, reference.mxfp4_gemm(x, weight, scales))


def quantised(row, x, global_scale=1.0):
    """Codes and scales of the row, and the values that they stand for."""
    out = torch.full((x.shape[0], x.shape[1] // 2), 0x99, dtype=torch.uint8, device=x.device)
    scales = torch.full((x.shape[0], x.shape[1] // 16), 0x7F, dtype=torch.uint8, device=x.device).view(E4M3)
    assert row(x, torch.tensor([global_scale], device=x.device), out=out, scales=scales) is out
    numbers = torch.cat((E2M1, -E2M1)).to(x.device)[torch.stack((out & 15, out >> 4), 2).flatten(1).long()]
    return out, scales.float(), numbers.double() * scales.double().repeat_interleave(16, 1) * global_scale


@pytest.mark.case("E10")
@each_row_of("quantize_nvfp4")
@pytest.mark.parametrize("most", [1.2, 2.7, 5.5, 6.0, 6.01, 7.99, 448.0, 2.0**-126])
def test_the_largest_of_a_group_is_kept_within_a_step(quantize_nvfp4, most, device):
    """Half the step at the top of the codes, and what a scale rounded down by up to 1/16 cuts off."""
    x = most * (2 * torch.rand(9, 64, device=device) - 1)
    x[:, 7::16], x[::2, 7::16] = most, -most
    _, scales, values = quantised(quantize_nvfp4, x)
    assert (scales > 0).all()
    assert scales.isfinite().all()
    error = (values - x.double()).abs()
    assert (error <= scales.double().repeat_interleave(16, 1) + most / 16).all()
    if most >= 1.2:
        assert ((values / x.double())[:, 7::16] >= 0.8).all()
    else:
        assert (values == 0).all()


@pytest.mark.case("E10")
@each_row_of("quantize_nvfp4")
def test_what_is_larger_than_any_scale_holds_saturates(quantize_nvfp4, device):
    x = torch.full((2, 32), 1.0, device=device)
    x[0, 0], x[0, 17], x[1, 3] = 3e38, -math.inf, 2688.5
    _, scales, values = quantised(quantize_nvfp4, x)
    assert scales[0].tolist() == [448.0, 448.0]
    assert values[0, [0, 17]].tolist() == [2688.0, -2688.0]
    assert (values[1, 3], scales[1, 0]) == (2688.0, 448.0)


@each_row_of("quantize_nvfp4")
def test_a_nan_is_not_hidden_and_stays_in_its_group(quantize_nvfp4, device):
    x = torch.randn(3, 48, device=device)
    _, _, whole = quantised(quantize_nvfp4, x)
    x[1, 20] = math.nan
    _, _, values = quantised(quantize_nvfp4, x)
    assert values[1, 16:32].isnan().all()
    kept = values.isfinite()
    assert kept.sum() == 3 * 48 - 16
    assert torch.equal(values[kept], whole[kept])


@pytest.mark.case("E10")
@each_row_of("quantize_nvfp4")
def test_scales_are_rounded_as_torch_rounds_to_e4m3(quantize_nvfp4, device):
    """Every e4m3 number above 0, what lies halfway to the next and a little to both sides; 6 times each is a group's largest."""
    every = torch.arange(1, 127, dtype=torch.uint8, device=device).view(E4M3).float()
    halfway = (every[1:] + every[:-1]) / 2
    wanted = torch.cat((every, halfway, halfway * (1 - 2.0**-12), halfway * (1 + 2.0**-12)))
    x = torch.zeros(wanted.numel(), 16, device=device)
    x[:, 9] = 6 * wanted
    _, scales, _ = quantised(quantize_nvfp4, x)
    assert torch.equal(scales[:, 0], (x[:, 9] / 6).to(E4M3).float())


@each_row_of("quantize_nvfp4")
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_of_codes_go_to_the_even_one(quantize_nvfp4, dtype, device):
    x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2], dtype=dtype, device=device)
    x[0, 8:] *= -1
    _, _, values = quantised(quantize_nvfp4, x)
    assert values[0].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -6.0]


@pytest.mark.case("E2")
@each_row_of("quantize_nvfp4")
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, -1e-30, 1e-42], ids=str)
def test_groups_of_nothing_have_codes_of_zero_and_a_scale_above_it(quantize_nvfp4, value, device):
    """A group of them, and one of zeros with a single one, in the middle of others, which stay as they are without them."""
    x = torch.randn(3, 64, device=device)
    _, _, before = quantised(quantize_nvfp4, x)
    x[1, 16:32] = value
    x[1, 32:48] = 0
    x[1, 37] = value
    _, scales, values = quantised(quantize_nvfp4, x)
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert (values[1, 16:48] == 0).all()
    assert torch.equal(values[0::2], before[0::2])
    assert torch.equal(values[1, :16], before[1, :16])
    assert torch.equal(values[1, 48:], before[1, 48:])


@pytest.mark.case("E2")
@pytest.mark.case("G13")
@each_row_of("quantize_nvfp4")
def test_quantize_nvfp4_of_no_tokens_launches_nothing(quantize_nvfp4, device, monkeypatch):
    forbid_launches(quantize_nvfp4, monkeypatch)
    codes, _, _ = quantised(quantize_nvfp4, torch.empty(0, 64, device=device))
    assert codes.shape == (0, 32)


@pytest.mark.case("G13")
@each_row_of("nvfp4_gemm")
def test_nvfp4_gemm_of_no_tokens_launches_nothing(nvfp4_gemm, device, monkeypatch):
    forbid_launches(nvfp4_gemm, monkeypatch)
    x, out = torch.empty(0, 64, device=device), torch.empty(0, 5, device=device)
    assert nvfp4_gemm(x, bytes_of(5, 32, device), e4m3_of(5, 4, device), torch.ones(5, device=device), out=out) is out


@pytest.mark.case("G13")
@each_row_of("mxfp4_gemm")
def test_mxfp4_gemm_of_no_tokens_launches_nothing(mxfp4_gemm, device, monkeypatch):
    forbid_launches(mxfp4_gemm, monkeypatch)
    x, out = torch.empty(0, 64, device=device), torch.empty(0, 5, device=device)
    assert mxfp4_gemm(x, bytes_of(5, 32, device), e8m0_of(5, 2, device), out=out) is out


def forbid_launches(row, monkeypatch):
    """No kernel of a Triton row's module can be launched from here on."""
    if "triton" in row.spec.requires.packages:
        load_target(row.spec)
        module, kernel = row.spec.target.partition(":")[0], f"_{row.spec.op}_kernel"
        if row.spec.op != "quantize_nvfp4":
            module, kernel = "rapid_llm.kernels.ops.quantization.fp4_product", "_fp4_gemm_kernel"
        monkeypatch.setattr(importlib.import_module(module), kernel, None)


WEIGHT = torch.ones(5, 32, dtype=torch.uint8)
ONES = {"x": torch.ones(3, 64), "weight": WEIGHT, "out": torch.zeros(3, 5), "bias": None}
NVFP4 = {**ONES, "scales": torch.ones(5, 4, dtype=torch.uint8).view(E4M3), "global_scales": torch.ones(5)}
MXFP4 = {**ONES, "scales": torch.ones(5, 2, dtype=torch.uint8)}
SHARED_REFUSALS = [
    pytest.param({"weight": WEIGHT.to(torch.int8)}, id="signed-weight"),
    pytest.param({"weight": torch.ones(5, 64, dtype=torch.uint8)}, id="a-code-a-byte"),
    pytest.param({"weight": torch.ones(5, 33, dtype=torch.uint8)[:, 1:]}, id="rows-that-begin-anywhere"),
    pytest.param({"weight": torch.ones(5, 36, dtype=torch.uint8)[:, 1:33]}, id="a-first-byte-between-words"),
    pytest.param({"weight": torch.ones(32, 5, dtype=torch.uint8).t()}, id="transposed-weight"),
    pytest.param({"scales": torch.ones(5, 2)}, id="scales-of-floats"),
    pytest.param({"x": torch.ones(3, 128)[:, ::2]}, id="every-other-column"),
    pytest.param({"x": torch.ones(3, 32)}, id="x-of-another-k"),
    pytest.param({"x": torch.ones(3, 8), "weight": torch.ones(5, 4, dtype=torch.uint8)}, id="part-of-a-group"),
    pytest.param({"out": torch.zeros(5, 3).t()}, id="transposed-out"),
    pytest.param({"out": torch.zeros(3, 5).half()}, id="mixed-dtypes"),
    pytest.param({"bias": torch.ones(4)}, id="short-bias"),
    pytest.param({"bias": torch.ones(10)[::2]}, id="strided-bias"),
]


def refused(row, arguments, device):
    moved = {name: None if value is None else moved_to(device, value) for name, value in arguments.items()}
    with pytest.raises(KernelInputError, match=rf"{row.spec.op}\(x \["):
        row(**moved)
    assert (moved["out"] == 0).all()


def moved_to(device, value):
    """A copy on ``device`` of all that the view lies in, and the same view of it: its offset is what one refusal is about."""
    whole = value.as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
    return whole.clone().to(device).as_strided(value.shape, value.stride(), value.storage_offset())


@each_row_of("nvfp4_gemm")
@pytest.mark.parametrize(
    "changed",
    [
        *SHARED_REFUSALS,
        pytest.param({"scales": torch.ones(5, 4, dtype=torch.uint8)}, id="scales-of-bytes"),
        pytest.param({"scales": torch.ones(5, 2, dtype=torch.uint8).view(E4M3)}, id="scales-of-32"),
        pytest.param({"scales": torch.ones(4, 4, dtype=torch.uint8).view(E4M3)}, id="scales-of-other-outputs"),
        pytest.param({"scales": torch.ones(4, 5, dtype=torch.uint8).view(E4M3).t()}, id="transposed-scales"),
        pytest.param({"global_scales": torch.ones(1)}, id="one-scale-for-all"),
        pytest.param({"global_scales": torch.ones(5).half()}, id="narrow-global-scales"),
    ],
)
def test_nvfp4_gemm_refuses_what_it_would_misread(nvfp4_gemm, changed, device):
    refused(nvfp4_gemm, {**NVFP4, **changed}, device)


@each_row_of("mxfp4_gemm")
@pytest.mark.parametrize(
    "changed",
    [
        *SHARED_REFUSALS,
        pytest.param({"scales": torch.ones(5, 2, dtype=torch.int8)}, id="signed-scales"),
        pytest.param({"scales": torch.ones(2, 5, dtype=torch.uint8).t()}, id="transposed-scales"),
        pytest.param({"scales": torch.ones(5, 4, dtype=torch.uint8)}, id="scales-of-16"),
        pytest.param({"scales": torch.ones(4, 2, dtype=torch.uint8)}, id="scales-of-other-outputs"),
    ],
)
def test_mxfp4_gemm_refuses_what_it_would_misread(mxfp4_gemm, changed, device):
    refused(mxfp4_gemm, {**MXFP4, **changed}, device)


QUANTISED = {
    "x": torch.ones(3, 64),
    "global_scale": torch.ones(1),
    "out": torch.zeros(3, 32, dtype=torch.uint8),
    "scales": torch.ones(3, 4, dtype=torch.uint8).view(E4M3),
}


@each_row_of("quantize_nvfp4")
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"x": torch.ones(3, 72)}, id="part-of-a-group"),
        pytest.param({"x": torch.ones(3, 128)[:, ::2]}, id="every-other-column"),
        pytest.param({"x": torch.ones(3, 64, dtype=torch.int32)}, id="integers"),
        pytest.param({"global_scale": torch.ones(3)}, id="a-scale-a-token"),
        pytest.param({"global_scale": torch.ones(())}, id="scalar-global-scale"),
        pytest.param({"out": torch.zeros(3, 64, dtype=torch.uint8)}, id="a-code-a-byte"),
        pytest.param({"out": torch.zeros(32, 3, dtype=torch.uint8).t()}, id="transposed-out"),
        pytest.param({"scales": torch.ones(3, 4, dtype=torch.uint8)}, id="scales-of-bytes"),
        pytest.param({"scales": torch.ones(3, 2, dtype=torch.uint8).view(E4M3)}, id="scales-of-other-groups"),
    ],
)
def test_quantize_nvfp4_refuses_what_it_would_misread(quantize_nvfp4, changed, device):
    refused(quantize_nvfp4, {**QUANTISED, **changed}, device)
