"""Products with weight-only quantised weights against their float64 twins, on every row that this machine runs."""

import importlib
import math

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.device import device_info
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.ops.tile_policy import Tile
from tests import reference
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to

CASES = [
    pytest.param(1, 64, 256, id="decode-single-token"),
    pytest.param(7, 100, 96, id="ragged-width"),
    pytest.param(65, 33, 160, id="one-past-a-tile"),
]
GROUPS = [16, 32, 64, 128, 256, 512, 1024, None]  # None: one scale an output
E4M3 = torch.float8_e4m3fn


def native(op):
    """The Triton rows among those that this machine runs."""
    return [row for row in each_row_of(op).args[1] if "triton" in row.values[0].spec.requires.packages]


def scales_of(n, groups, device, dtype=torch.float32):
    """Neighbours a thousand times apart, so that a scale of the wrong group or output shows."""
    scales = (0.5 + torch.rand(n, groups, device=device)) / 64
    scales.view(-1)[::2] /= 1000
    return scales.to(dtype)


def bytes_of(n, k, device):
    return torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device)


def w8_of(n, k, device, dtype=torch.int8):
    codes = bytes_of(n, k, device)
    return torch.where(codes & 127 == 127, 0, codes).to(torch.uint8).view(dtype)


def assert_product(out, expected):
    """One rounding to the dtype, and up to 4,096 fp32 additions, each within an eps of outputs that are of the largest's size."""
    largest = float(expected.abs().max())
    rtol = max(1e-6, torch.finfo(out.dtype).eps / 2)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-5 * max(largest, 1e-3))


@each_row_of("w8a16_gemm")
def test_w8a16_gemm_holds_over_its_whole_sweep(w8a16_gemm, device):
    assert broken_cases(w8a16_gemm, device) == []


@each_row_of("w4a16_gemm")
def test_w4a16_gemm_holds_over_its_whole_sweep(w4a16_gemm, device):
    assert broken_cases(w4a16_gemm, device) == []


@pytest.mark.case("G11")
@each_row_of("w8a16_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [pytest.param(torch.int8, id="int8"), pytest.param(E4M3, id="e4m3")])
@pytest.mark.parametrize(("num_tokens", "n", "k"), CASES)
def test_w8a16_gemm_reads_strided_views_and_writes_its_columns_only(w8a16_gemm, num_tokens, n, k, stored, dtype, device):
    x = torch.randn(num_tokens, k + 9, device=device).to(dtype)[:, 1 : k + 1]
    weight, scales = w8_of(n, k + 7, device, stored)[:, 3 : k + 3], scales_of(n, k // 32 + 3, device)[:, 1 : k // 32 + 1]
    bias = torch.randn(n + 1, device=device).to(dtype)[1:]
    buffer = torch.full((num_tokens, n + 9), 7.0, dtype=dtype, device=device)

    w8a16_gemm(x, weight, scales, out=buffer[:, :n], bias=bias)

    assert_product(buffer[:, :n], reference.w8a16_gemm(x, weight, scales, bias=bias))
    assert (buffer[:, n:] == 7.0).all()


@pytest.mark.case("G11")
@each_row_of("w4a16_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [pytest.param(True, id="symmetric"), pytest.param(False, id="zero-points")])
@pytest.mark.parametrize(("num_tokens", "n", "k"), CASES)
def test_w4a16_gemm_reads_strided_views_and_writes_its_columns_only(w4a16_gemm, num_tokens, n, k, symmetric, dtype, device):
    groups = k // 32
    x = torch.randn(num_tokens, k + 9, device=device).to(dtype)[:, 1 : k + 1]
    weight, scales = (
        bytes_of(n, k // 2 + 7, device)[:, 3 : k // 2 + 3],
        scales_of(n, groups + 3, device, dtype)[:, 1 : groups + 1],
    )
    zeros = None if symmetric else (bytes_of(n, groups + 2, device) & 15)[:, 1 : groups + 1]
    bias = torch.randn(n + 1, device=device).to(dtype)[1:]
    buffer = torch.full((num_tokens, n + 9), 7.0, dtype=dtype, device=device)

    w4a16_gemm(x, weight, scales, out=buffer[:, :n], zeros=zeros, bias=bias)

    assert_product(buffer[:, :n], reference.w4a16_gemm(x, weight, scales, zeros=zeros, bias=bias))
    assert (buffer[:, n:] == 7.0).all()


@each_row_of("w8a16_gemm")
@pytest.mark.parametrize("group", GROUPS)
def test_w8a16_gemm_scales_every_group_by_its_own(w8a16_gemm, group, device):
    n, k = 33, max(2 * group, 1024) if group else 100
    x, weight = torch.randn(3, k, device=device), w8_of(n, k, device)
    scales = scales_of(n, k // group if group else 1, device)
    scales = scales if group else scales[:, 0]
    out = torch.empty(3, n, device=device)
    assert_product(w8a16_gemm(x, weight, scales, out=out), reference.w8a16_gemm(x, weight, scales))


@each_row_of("w4a16_gemm")
@pytest.mark.parametrize("group", GROUPS)
def test_w4a16_gemm_scales_every_group_by_its_own(w4a16_gemm, group, device):
    n, k = 33, max(2 * group, 1024) if group else 100
    x, weight = torch.randn(3, k, device=device), bytes_of(n, k // 2, device)
    groups = k // group if group else 1
    scales, zeros = scales_of(n, groups, device), bytes_of(n, groups, device) & 15
    out = torch.empty(3, n, device=device)
    assert_product(w4a16_gemm(x, weight, scales, out=out, zeros=zeros), reference.w4a16_gemm(x, weight, scales, zeros=zeros))


@each_row_of("w8a16_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [pytest.param(torch.int8, id="int8"), pytest.param(E4M3, id="e4m3")])
def test_every_byte_of_a_weight_is_read_exactly(w8a16_gemm, stored, dtype, device):
    """One element a row, times one: subnormals, both zeros and both NaNs of e4m3 come out as they are."""
    weight = torch.zeros(256, 16, dtype=torch.uint8, device=device)
    weight[:, 0] = torch.arange(256, device=device)
    x, out = torch.zeros(1, 16, dtype=dtype, device=device), torch.empty(1, 256, dtype=dtype, device=device)
    x[0, 0] = 1
    w8a16_gemm(x, weight.view(stored), torch.ones(256, device=device), out=out)
    torch.testing.assert_close(out[0], weight.view(stored)[:, 0].float().to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.case("J8")
@each_row_of("w4a16_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_zero_point_with_every_code_is_exact(w4a16_gemm, dtype, device):
    """Row z has the zero point z in its first group and 15 - z in its second; one element of x at a time is 1."""
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(16, 2)
    zeros = torch.stack((codes, codes.flip(0)), 1)
    x, out = torch.eye(32, dtype=dtype, device=device), torch.empty(32, 16, dtype=dtype, device=device)
    w4a16_gemm(x, packed, torch.full((16, 2), 0.5, dtype=dtype, device=device), out=out, zeros=zeros)
    expected = (codes.repeat(2)[:, None].double() - zeros.T.repeat_interleave(16, 0)) / 2
    assert torch.equal(out.double(), expected)


@each_row_of("w4a16_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_points_between_codes_are_exact(w4a16_gemm, dtype, device):
    """Quarters from -4 to 19.75, with every code; one element of x at a time is 1: results of at most 8 bits."""
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(48, 2)
    zeros = (torch.arange(96, device=device).float() / 4 - 4).view(48, 2)
    x, out = torch.eye(32, dtype=dtype, device=device), torch.empty(32, 48, dtype=dtype, device=device)
    w4a16_gemm(x, packed, torch.full((48, 2), 0.5, dtype=dtype, device=device), out=out, zeros=zeros)
    assert torch.equal(out.double(), (codes.repeat(2)[:, None].double() - zeros.T.repeat_interleave(16, 0)) / 2)


@each_row_of("w4a16_gemm")
@pytest.mark.parametrize("group", GROUPS)
def test_a_number_for_zero_point_belongs_to_its_own_group(w4a16_gemm, group, device):
    n, k = 33, max(2 * group, 1024) if group else 100
    x, weight = torch.randn(3, k, device=device), bytes_of(n, k // 2, device)
    groups = k // group if group else 1
    scales, zeros = scales_of(n, groups, device), 32 * torch.rand(n, groups, device=device) - 8
    out = torch.empty(3, n, device=device)
    assert_product(w4a16_gemm(x, weight, scales, out=out, zeros=zeros), reference.w4a16_gemm(x, weight, scales, zeros=zeros))


@each_row_of("w4a16_gemm")
def test_without_zero_points_eight_is_zero(w4a16_gemm, device):
    packed = torch.full((5, 32), 0x88, dtype=torch.uint8, device=device)
    out = torch.empty(2, 5, device=device)
    w4a16_gemm(torch.ones(2, 64, device=device), packed, torch.ones(5, 1, device=device), out=out)
    assert (out == 0).all()


@pytest.mark.parametrize("w4a16_gemm", native("w4a16_gemm"))
@pytest.mark.parametrize(
    "tile",
    [
        Tile(16, 16, 16),
        Tile(16, 32, 64, SPLIT_K=4),
        Tile(64, 16, 256, SPLIT_K=2),
        Tile(16, 64, 1024),
        Tile(1, 2, 256),
        Tile(1, 4, 1024, num_warps=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [16, 64, 512, 544])
def test_any_tile_keeps_the_groups_of_w4a16_gemm_apart(w4a16_gemm, group, tile, device, monkeypatch):
    """A tile from a store or a search may cut a group or hold several: 544 is all of k, and no power of two."""
    monkeypatch.setattr(importlib.import_module(w4a16_gemm.spec.target.partition(":")[0]), "resolve_tiles", lambda *_, **__: tile)
    k = 544 if group == 544 else 1024 if group == 512 else 576
    x, weight = torch.randn(1 if tile.BLOCK_M == 1 else 5, k, device=device), bytes_of(37, k // 2, device)
    scales, codes = scales_of(37, k // group, device), bytes_of(37, k // group, device) & 15
    bias = torch.randn(37, device=device)
    for zeros in (codes, codes + 0.25, None):
        out = torch.full((len(x), 37), math.nan, device=device)
        w4a16_gemm(x, weight, scales, out=out, zeros=zeros, bias=bias)
        assert_product(out, reference.w4a16_gemm(x, weight, scales, zeros=zeros, bias=bias))


@pytest.mark.parametrize("w8a16_gemm", native("w8a16_gemm"))
@pytest.mark.parametrize("stored", [pytest.param(torch.int8, id="int8"), pytest.param(E4M3, id="e4m3")])
@pytest.mark.parametrize(
    "tile", [Tile(16, 16, 32), Tile(64, 16, 256, SPLIT_K=2), Tile(1, 2, 128), Tile(1, 4, 1024, num_warps=1)], ids=str
)
@pytest.mark.parametrize("group", [16, 256, 544])
def test_any_tile_keeps_the_groups_of_w8a16_gemm_apart(w8a16_gemm, group, tile, stored, device, monkeypatch):
    """300 tokens are 19 tiles of 16: two groups of eight and one of three."""
    monkeypatch.setattr(importlib.import_module(w8a16_gemm.spec.target.partition(":")[0]), "resolve_tiles", lambda *_, **__: tile)
    k = 544 if group == 544 else 512 if group == 256 else 48
    tokens = 1 if tile.BLOCK_M == 1 else 300 if group == 16 else 5
    x, weight, scales = torch.randn(tokens, k, device=device), w8_of(37, k, device, stored), scales_of(37, k // group, device)
    bias, out = torch.randn(37, device=device), torch.full((tokens, 37), math.nan, device=device)
    w8a16_gemm(x, weight, scales, out=out, bias=bias)
    assert_product(out, reference.w8a16_gemm(x, weight, scales, bias=bias))


@pytest.mark.parametrize("w8a16_gemm", native("w8a16_gemm"))
@pytest.mark.parametrize("tokens", [1, 3])
def test_where_a_device_has_no_e4m3_its_bytes_are_decoded(w8a16_gemm, tokens, device, monkeypatch):
    """Every byte in turn."""
    module = importlib.import_module(w8a16_gemm.spec.target.partition(":")[0])
    monkeypatch.setattr(module, "launch_device", lambda tensor: device_info("a100"))
    x, weight = torch.randn(tokens, 64, device=device), torch.arange(256, dtype=torch.uint8, device=device).view(4, 64)
    weight = torch.where(weight & 127 == 127, 0, weight).to(torch.uint8).view(E4M3)
    out = torch.empty(tokens, 4, device=device)
    w8a16_gemm(x, weight, torch.ones(4, device=device), out=out)
    assert_product(out, reference.w8a16_gemm(x, weight, torch.ones(4, device=device)))


@each_row_of("w8a16_gemm")
def test_an_infinity_or_a_nan_spoils_its_own_token_only(w8a16_gemm, device):
    x, weight = torch.randn(4, 64, device=device), w8_of(33, 64, device)
    x[1, 5], x[3, 7] = math.inf, math.nan
    out = w8a16_gemm(x, weight, scales_of(33, 2, device), out=torch.empty(4, 33, device=device))
    assert out[0::2].isfinite().all()
    assert not out[1].isfinite().any()
    assert out[3].isnan().all()


@each_row_of("w4a16_gemm")
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16")])
def test_sums_are_kept_in_fp32(w4a16_gemm, dtype, device):
    """4,096 times 1: a bf16 sum of ones stops at 256, an fp16 one at 2,048."""
    packed = torch.full((3, 2048), 0x99, dtype=torch.uint8, device=device)
    out = torch.empty(1, 3, dtype=dtype, device=device)
    w4a16_gemm(torch.ones(1, 4096, dtype=dtype, device=device), packed, torch.ones(3, 32, dtype=dtype, device=device), out=out)
    assert out.tolist() == [[4096.0] * 3]


@pytest.mark.case("G13")
@each_row_of("w8a16_gemm")
def test_w8a16_gemm_of_no_tokens_launches_nothing(w8a16_gemm, device, monkeypatch):
    forbid_launches(w8a16_gemm, monkeypatch)
    x, out = torch.empty(0, 64, device=device), torch.empty(0, 5, device=device)
    assert w8a16_gemm(x, w8_of(5, 64, device), torch.ones(5, device=device), out=out) is out


@pytest.mark.case("G13")
@each_row_of("w4a16_gemm")
def test_w4a16_gemm_of_no_tokens_launches_nothing(w4a16_gemm, device, monkeypatch):
    forbid_launches(w4a16_gemm, monkeypatch)
    x, out = torch.empty(0, 64, device=device), torch.empty(0, 5, device=device)
    assert w4a16_gemm(x, bytes_of(5, 32, device), torch.ones(5, 2, device=device), out=out) is out


def forbid_launches(row, monkeypatch):
    """No kernel of a Triton row's module can be launched from here on."""
    if "triton" in row.spec.requires.packages:
        load_target(row.spec)
        monkeypatch.setattr(importlib.import_module(row.spec.target.partition(":")[0]), f"_{row.spec.op}_kernel", None)


ONES = {"x": torch.ones(3, 64), "out": torch.zeros(3, 5), "bias": None}
W8 = {**ONES, "weight": torch.ones(5, 64, dtype=torch.int8), "scales": torch.ones(5, 2)}
W4 = {**ONES, "weight": torch.ones(5, 32, dtype=torch.uint8), "scales": torch.ones(5, 2), "zeros": None}
SHARED_REFUSALS = [
    pytest.param({"scales": torch.ones(5, 3)}, id="group-that-does-not-divide-k"),
    pytest.param({"scales": torch.ones(5, 8)}, id="group-of-8"),
    pytest.param({"scales": torch.ones(4, 2)}, id="scales-of-other-outputs"),
    pytest.param({"scales": torch.ones(5, 2).bfloat16()}, id="scales-of-another-dtype"),
    pytest.param({"scales": torch.ones(2, 5).t()}, id="transposed-scales"),
    pytest.param({"scales": torch.ones(5, 0)}, id="no-scales"),
    pytest.param({"weight": torch.ones(5, 64)}, id="weight-of-floats"),
    pytest.param({"x": torch.ones(3, 128)[:, ::2]}, id="every-other-column"),
    pytest.param({"x": torch.ones(3, 32)}, id="x-of-another-k"),
    pytest.param({"out": torch.zeros(5, 3).t()}, id="transposed-out"),
    pytest.param({"out": torch.zeros(3, 5).half()}, id="mixed-dtypes"),
    pytest.param({"bias": torch.ones(4)}, id="short-bias"),
    pytest.param({"bias": torch.ones(10)[::2]}, id="strided-bias"),
]


def refused(row, arguments, device):
    moved = {name: None if value is None else to(device, value) for name, value in arguments.items()}
    with pytest.raises(KernelInputError, match=rf"{row.spec.op}\(x \["):
        row(**moved)
    assert (moved["out"] == 0).all()


@each_row_of("w8a16_gemm")
@pytest.mark.parametrize(
    "changed",
    [
        *SHARED_REFUSALS,
        pytest.param({"weight": torch.ones(5, 64, dtype=torch.uint8)}, id="unsigned-weight"),
        pytest.param({"weight": torch.ones(64, 5, dtype=torch.int8).t()}, id="transposed-weight"),
        pytest.param({"x": torch.ones(3, 96), "weight": torch.ones(5, 96, dtype=torch.int8)}, id="group-of-48"),
        pytest.param({"scales": torch.ones(())}, id="one-scale-for-all"),
    ],
)
def test_w8a16_gemm_refuses_what_it_would_misread(w8a16_gemm, changed, device):
    refused(w8a16_gemm, {**W8, **changed}, device)


@each_row_of("w4a16_gemm")
@pytest.mark.parametrize(
    "changed",
    [
        *SHARED_REFUSALS,
        pytest.param({"weight": torch.ones(5, 32, dtype=torch.int8)}, id="signed-weight"),
        pytest.param({"weight": torch.ones(5, 64, dtype=torch.uint8)}, id="a-code-a-byte"),
        pytest.param({"scales": torch.ones(5)}, id="flat-scales"),
        pytest.param({"zeros": torch.ones(5, 1, dtype=torch.uint8)}, id="zeros-of-other-groups"),
        pytest.param({"zeros": torch.ones(5, 2).half()}, id="zeros-of-16-bits"),
        pytest.param({"zeros": torch.ones(5, 1)}, id="numbers-for-other-groups"),
        pytest.param({"x": torch.ones(3, 4096), "weight": torch.ones(5, 2048, dtype=torch.uint8)}, id="group-of-2048"),
    ],
)
def test_w4a16_gemm_refuses_what_it_would_misread(w4a16_gemm, changed, device):
    refused(w4a16_gemm, {**W4, **changed}, device)
