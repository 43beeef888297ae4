"""dense_gemm against its float64 twin, on every row that this machine runs."""

import importlib
from functools import partial

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.ops.gemm import library_gemm
from rapid_llm.kernels.ops.tile_policy import Tile
from tests import reference
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to

CASES = [
    pytest.param(1, 576, 576, id="decode-single-token"),
    pytest.param(7, 1000, 512, id="ragged-width"),
    pytest.param(65, 129, 257, id="one-past-a-tile"),
]


def weight_of(n, k, dtype, device):
    return (torch.randn(n, k, device=device) * k**-0.5).to(dtype)


def skip_unless_served(row, dtype):
    if str(dtype).removeprefix("torch.") not in row.spec.dtypes:
        pytest.skip(f"{row.spec.name} does not claim {dtype}")


def assert_product(out, x, weight, bias=None):
    """Outputs of size 1 from at most 4,096 fp32 additions: 1e-5; and one rounding to the dtype."""
    expected = reference.dense_gemm(x, weight, bias=bias)
    torch.testing.assert_close(out.double(), expected, rtol=max(1e-6, torch.finfo(out.dtype).eps / 2), atol=1e-5)


@each_row_of("dense_gemm")
def test_dense_gemm_holds_over_its_whole_sweep(dense_gemm, device):
    assert broken_cases(dense_gemm, device) == []


@each_row_of("dense_gemm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["n-by-k", "k-by-n"])
@pytest.mark.parametrize("with_bias", [pytest.param(False, id="plain"), pytest.param(True, id="bias")])
@pytest.mark.parametrize(("num_tokens", "n", "k"), CASES)
def test_dense_gemm_writes_its_columns_and_no_others(dense_gemm, num_tokens, n, k, with_bias, layout, dtype, device):
    skip_unless_served(dense_gemm, dtype)
    x = torch.randn(num_tokens, k + 9, device=device).to(dtype)[:, :k]
    weight = weight_of(n, k, dtype, device)
    if layout == "k-by-n":
        weight = weight.t().clone(memory_format=torch.contiguous_format).t()
    bias = torch.randn(n, device=device).to(dtype) if with_bias else None
    buffer = torch.full((num_tokens, n + 9), 7.0, dtype=dtype, device=device)

    dense_gemm(x, weight, out=buffer[:, :n], bias=bias)

    assert_product(buffer[:, :n], x, weight, bias)
    assert (buffer[:, n:] == 7.0).all()


@pytest.mark.case("G13")
@each_row_of("dense_gemm")
def test_an_odd_stride_and_a_base_off_by_one_element_work_after_an_aligned_call(dense_gemm, device):
    n, k = 1953, 3960
    weight = weight_of(n, k, torch.bfloat16, device)
    aligned = torch.randn(4, k, device=device).bfloat16()
    out = torch.empty(4, n, dtype=torch.bfloat16, device=device)
    dense_gemm(aligned, weight, out=out)
    assert_product(out, aligned, weight)

    odd = torch.randn(4 * k + 1, device=device).bfloat16()[1:].view(4, k)
    storage = torch.empty(4 * n + 1, dtype=torch.bfloat16, device=device)
    dense_gemm(odd, weight, out=storage[1:].view(4, n))
    assert_product(storage[1:].view(4, n), odd, weight)
    assert storage[0].isnan()


@pytest.mark.case("G11")
@each_row_of("dense_gemm")
def test_one_row_for_all_tokens_through_a_stride_of_zero(dense_gemm, device):
    row, weight = torch.randn(1, 64, device=device), weight_of(33, 64, torch.float32, device)
    out = torch.empty(5, 33, device=device)
    dense_gemm(row.expand(5, 64), weight, out=out)
    assert_product(out, row.expand(5, 64), weight)


@each_row_of("dense_gemm")
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16")])
def test_sums_are_kept_in_fp32(dense_gemm, dtype, device):
    """4,096 times 1: a bf16 sum of ones stops at 256, an fp16 one at 2,048."""
    skip_unless_served(dense_gemm, dtype)
    x, weight = torch.ones(1, 4096, dtype=dtype, device=device), torch.ones(3, 4096, dtype=dtype, device=device)
    out = torch.empty(1, 3, dtype=dtype, device=device)
    dense_gemm(x, weight, out=out)
    assert out.tolist() == [[4096.0] * 3]


@pytest.mark.case("G13")
@each_row_of("dense_gemm")
def test_dense_gemm_of_no_tokens_is_empty(dense_gemm, device):
    weight = torch.ones(5, 64, device=device)
    assert dense_gemm(torch.empty(0, 64, device=device), weight, out=torch.empty(0, 5, device=device)).shape == (0, 5)


@pytest.mark.case("G11")
@each_row_of("dense_gemm")
@pytest.mark.parametrize(
    ("x", "weight", "out", "bias"),
    [
        pytest.param(torch.ones(3, 128)[:, ::2], torch.ones(5, 64), torch.zeros(3, 5), None, id="every-other-column"),
        pytest.param(torch.ones(64, 3).t(), torch.ones(5, 64), torch.zeros(3, 5), None, id="transposed-x"),
        pytest.param(torch.ones(3, 64), torch.ones(5, 64), torch.zeros(5, 3).t(), None, id="transposed-out"),
        pytest.param(torch.ones(3, 64), torch.ones(64, 5), torch.zeros(3, 5), None, id="weight-the-other-way"),
        pytest.param(torch.ones(3, 64), torch.ones(5, 64).half(), torch.zeros(3, 5), None, id="mixed-dtypes"),
        pytest.param(torch.ones(3, 64), torch.ones(5, 64), torch.zeros(3, 5), torch.ones(4), id="short-bias"),
        pytest.param(torch.ones(3, 64), torch.ones(5, 64), torch.zeros(3, 5), torch.ones(10)[::2], id="strided-bias"),
    ],
)
def test_dense_gemm_refuses_what_it_would_misread(dense_gemm, x, weight, out, bias, device):
    out = to(device, out)
    with pytest.raises(KernelInputError, match=r"dense_gemm\(x \["):
        dense_gemm(to(device, x), to(device, weight), out=out, bias=None if bias is None else to(device, bias))
    assert (out == 0).all()


NATIVE_ROWS = [row for row in each_row_of("dense_gemm").args[1] if "triton" in row.values[0].spec.requires.packages]


@pytest.mark.parametrize("dense_gemm", NATIVE_ROWS)
@pytest.mark.parametrize("tile", [Tile(16, 16, 16), Tile(16, 64, 32), Tile(64, 16, 16), Tile(128, 32, 16)], ids=str)
@pytest.mark.parametrize("layout", ["n-by-k", "k-by-n"])
def test_every_tile_and_the_last_of_every_group_of_tiles_is_written(dense_gemm, layout, tile, device, monkeypatch):
    """300 rows are 19 tiles of 16: two groups of eight and one of three."""
    monkeypatch.setattr(importlib.import_module(dense_gemm.spec.target.partition(":")[0]), "resolve_tiles", lambda *_, **__: tile)
    x, weight = torch.randn(300, 50, device=device), weight_of(77, 50, torch.float32, device)
    if layout == "k-by-n":
        weight = weight.t().clone(memory_format=torch.contiguous_format).t()
    bias, out = torch.randn(77, device=device), torch.empty(300, 77, device=device)
    assert_product(dense_gemm(x, weight, out=out, bias=bias), x, weight, bias)


@pytest.mark.parametrize("dense_gemm", NATIVE_ROWS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 17), (5, 1023), (1025, 31), (4, 2048)])
def test_one_token_against_any_weight(dense_gemm, n, k, device):
    x, weight, bias = torch.randn(1, k, device=device), weight_of(n, k, torch.float32, device), torch.randn(n, device=device)
    buffer = torch.full((1, n + 9), 7.0, device=device)
    assert_product(dense_gemm(x, weight, out=buffer[:, :n], bias=bias), x, weight, bias)
    assert (buffer[:, n:] == 7.0).all()


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")], ids=["bf16", "fp16"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_the_library_row_keeps_partial_sums_in_fp32_and_leaves_the_users_setting(dtype, kind, with_bias, device, monkeypatch):
    matmul, flag, seen = torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", []

    def noted(product, *args, **kwargs):
        seen.append(getattr(matmul, flag))
        return product(*args, **kwargs)

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, partial(noted, getattr(torch, name)))
    x, weight = torch.randn(3, 64, device=device).to(dtype), weight_of(5, 64, dtype, device)
    bias = torch.randn(5, device=device).to(dtype) if with_bias else None
    before = getattr(matmul, flag)
    try:
        for setting in (True, False):
            setattr(matmul, flag, setting)
            library_gemm.dense_gemm(x, weight, out=torch.empty(3, 5, dtype=dtype, device=device), bias=bias)
            assert getattr(matmul, flag) is setting
    finally:
        setattr(matmul, flag, before)
    assert seen == [False, False]
