"""rms_norm and add_rms_norm against their float64 twins, on every row that this machine runs."""

import pytest
import torch

from rapid_llm.errors import KernelInputError
from tests import reference
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to

EPS = 1e-5
CASES = [
    pytest.param(1, 576, id="decode-single-token"),
    pytest.param(7, 1000, id="ragged-width"),
    pytest.param(3, 1025, id="one-past-a-tile"),
]


def assert_rounded_once(actual, expected, rounds=1):
    """fp32 maths, 2e-6, and ``rounds`` roundings to a narrower dtype, half an eps each."""
    eps = torch.finfo(actual.dtype).eps if actual.dtype != torch.float32 else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=rounds * eps / 2 + 2e-6, atol=1e-6)


@each_row_of("rms_norm")
def test_rms_norm_holds_over_its_whole_sweep(rms_norm, device):
    assert broken_cases(rms_norm, device) == []


@each_row_of("add_rms_norm")
def test_add_rms_norm_holds_over_its_whole_sweep(add_rms_norm, device):
    assert broken_cases(add_rms_norm, device) == []


@each_row_of("rms_norm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "d"), CASES)
def test_rms_norm_writes_its_columns_and_no_others(rms_norm, num_tokens, d, dtype, device):
    x, weight = torch.randn(num_tokens, d, device=device).to(dtype), torch.randn(d, device=device).to(dtype)
    buffer = torch.full((num_tokens, d + 9), 7.0, dtype=dtype, device=device)

    rms_norm(x, weight, out=buffer[:, :d], eps=EPS)

    assert_rounded_once(buffer[:, :d], reference.rms_norm(x, weight, eps=EPS))
    assert (buffer[:, d:] == 7.0).all()


@pytest.mark.case("G6")
@pytest.mark.case("G11")
@each_row_of("rms_norm")
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_rms_norm_of_heads_in_place_leaves_the_rest_of_the_fused_projection(rms_norm, head_dim, device):
    fused = torch.randn(4, 5 * head_dim + 7, device=device)
    before, weight = fused.clone(), torch.randn(head_dim, device=device)
    heads = fused[:, head_dim : 4 * head_dim].view(4, 3, head_dim)

    rms_norm(heads, weight, out=heads, eps=EPS)

    expected = reference.rms_norm(before[:, head_dim : 4 * head_dim].view(4, 3, head_dim), weight, eps=EPS)
    assert_rounded_once(heads, expected)
    assert torch.equal(fused[:, :head_dim], before[:, :head_dim])
    assert torch.equal(fused[:, 4 * head_dim :], before[:, 4 * head_dim :])


@each_row_of("rms_norm")
@each_row_of("add_rms_norm")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_wider_than_registers_hold_is_walked(rms_norm, add_rms_norm, dtype, device):
    x, residual = (torch.randn(2, 33_001, device=device).to(dtype) for _ in range(2))
    weight, out = torch.randn(33_001, device=device).to(dtype), torch.empty_like(x)
    rms_norm(x, weight, out=out, eps=EPS)
    assert_rounded_once(out, reference.rms_norm(x, weight, eps=EPS))
    expected_residual, _ = reference.add_rms_norm(x, residual, weight, eps=EPS)

    add_rms_norm(x, residual, weight, out=x, eps=EPS)

    assert_rounded_once(residual, expected_residual)
    assert_rounded_once(x, reference.rms_norm(residual, weight, eps=EPS))


@pytest.mark.case("X6")
@each_row_of("rms_norm")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_zeros_is_zero_and_of_large_values_stays_finite(rms_norm, dtype, device):
    x = torch.tensor([[0.0] * 64, [1e4] * 64, [-448.25] * 64], device=device).to(dtype)
    out = torch.empty_like(x)
    rms_norm(x, torch.ones(64, dtype=dtype, device=device), out=out, eps=EPS)
    assert (out[0] == 0).all()
    assert_rounded_once(out[1:], torch.tensor([[1.0], [-1.0]], dtype=torch.float64, device=device).expand(2, 64))


@each_row_of("add_rms_norm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [pytest.param(False, id="apart"), pytest.param(True, id="out-is-x")])
@pytest.mark.parametrize(("num_tokens", "d"), CASES)
def test_add_rms_norm_norms_the_rounded_residual(add_rms_norm, num_tokens, d, in_place, dtype, device):
    x, residual = (torch.randn(num_tokens, d, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(d, device=device).to(dtype)
    expected_residual, _ = reference.add_rms_norm(x, residual, weight, eps=EPS)
    out = x if in_place else torch.empty_like(x)

    add_rms_norm(x, residual, weight, out=out, eps=EPS)

    assert_rounded_once(residual, expected_residual)
    assert_rounded_once(out, reference.rms_norm(residual, weight, eps=EPS))


@pytest.mark.case("G13")
@each_row_of("rms_norm")
@each_row_of("add_rms_norm")
def test_norms_of_no_tokens_are_empty(rms_norm, add_rms_norm, device):
    x, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    assert rms_norm(x, weight, out=x, eps=EPS).shape == (0, 64)
    assert add_rms_norm(x, torch.empty(0, 64, device=device), weight, out=x, eps=EPS).shape == (0, 64)


@pytest.mark.case("G11")
@each_row_of("rms_norm")
@pytest.mark.parametrize(
    ("x", "weight", "out"),
    [
        pytest.param(torch.ones(3, 128)[:, ::2], torch.ones(64), torch.zeros(3, 64), id="every-other-column"),
        pytest.param(torch.ones(64, 3).t(), torch.ones(64), torch.zeros(3, 64), id="transposed"),
        pytest.param(torch.ones(3, 64), torch.ones(63), torch.zeros(3, 64), id="weight-width"),
        pytest.param(torch.ones(3, 64), torch.ones(64), torch.zeros(2, 64), id="out-tokens"),
        pytest.param(torch.ones(3, 64), torch.ones(64).half(), torch.zeros(3, 64), id="mixed-dtypes"),
        pytest.param(torch.ones(64), torch.ones(64), torch.zeros(64), id="flat"),
    ],
)
def test_rms_norm_refuses_what_it_would_misread(rms_norm, x, weight, out, device):
    out = to(device, out)
    with pytest.raises(KernelInputError, match=r"rms_norm\(x \["):
        rms_norm(to(device, x), to(device, weight), out=out, eps=EPS)
    assert (out == 0).all()


@each_row_of("add_rms_norm")
def test_add_rms_norm_refuses_before_it_touches_the_residual(add_rms_norm, device):
    residual = torch.zeros(3, 64, device=device)
    with pytest.raises(KernelInputError, match="add_rms_norm"):
        add_rms_norm(
            torch.ones(3, 64, device=device),
            residual,
            torch.ones(63, device=device),
            out=torch.empty(3, 64, device=device),
            eps=EPS,
        )
    assert (residual == 0).all()
