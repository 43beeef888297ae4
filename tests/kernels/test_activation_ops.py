"""swiglu against its float64 twin, on every row that this machine runs."""

import pytest
import torch

from rapid_llm.errors import KernelInputError
from tests import reference
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to

CASES = [
    pytest.param(1, 128, id="decode-single-token"),
    pytest.param(7, 1000, id="ragged-width"),
    pytest.param(3, 1025, id="one-past-a-tile"),
]


@each_row_of("swiglu")
def test_swiglu_holds_over_its_whole_sweep(swiglu, device):
    assert broken_cases(swiglu, device) == []


@each_row_of("swiglu")
@pytest.mark.parametrize(("num_tokens", "d"), CASES)
def test_swiglu_writes_its_columns_and_no_others(swiglu, num_tokens, d, device):
    buffer = torch.full((num_tokens, d + 9), 7.0, device=device)
    gate_up = 8 * torch.randn(num_tokens, 2 * d, device=device)

    assert swiglu(gate_up, out=buffer[:, :d]).data_ptr() == buffer.data_ptr()

    # fp32 in and out: a few roundings of the result
    torch.testing.assert_close(buffer[:, :d].double(), reference.swiglu(gate_up), rtol=2e-6, atol=1e-6)
    assert (buffer[:, d:] == 7.0).all()


@pytest.mark.case("G11")
@each_row_of("swiglu")
def test_swiglu_reads_one_row_for_all_tokens_through_a_stride_of_zero(swiglu, device):
    row = torch.randn(1, 64, device=device)
    out = torch.empty(5, 32, device=device)
    swiglu(row.expand(5, 64), out=out)
    torch.testing.assert_close(out.double(), reference.swiglu(row).expand(5, 32), rtol=2e-6, atol=1e-6)


@pytest.mark.case("X6")
@each_row_of("swiglu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_of_saturated_gates_is_the_up_half_or_zero(swiglu, dtype, device):
    gate = torch.tensor([[1e4, -1e4, 448.25, -448.25, 0.0]], device=device)
    up = torch.tensor([[1.5, 1.5, -2.0, -2.0, 3.0]], device=device)
    out = torch.empty(1, 5, dtype=dtype, device=device)
    swiglu(torch.cat([gate, up], dim=1).to(dtype), out=out)
    assert out[0, 0] == gate.to(dtype)[0, 0] * 1.5
    assert out[0, 2] == gate.to(dtype)[0, 2] * -2.0
    assert (out[0, [1, 3, 4]] == 0).all()


@pytest.mark.case("G13")
@each_row_of("swiglu")
def test_swiglu_of_no_tokens_is_empty(swiglu, device):
    assert swiglu(torch.empty(0, 64, device=device), out=torch.empty(0, 32, device=device)).shape == (0, 32)


@pytest.mark.case("G11")
@each_row_of("swiglu")
@pytest.mark.parametrize(
    ("gate_up", "out"),
    [
        pytest.param(torch.ones(3, 64), torch.zeros(3, 33), id="width"),
        pytest.param(torch.ones(4, 64), torch.zeros(3, 32), id="tokens"),
        pytest.param(torch.ones(3, 128)[:, ::2], torch.zeros(3, 32), id="every-other-column"),
        pytest.param(torch.ones(64, 3).t(), torch.zeros(3, 32), id="transposed"),
        pytest.param(torch.ones(3, 64), torch.zeros(3, 32).double(), id="float64"),
        pytest.param(torch.ones(3, 64).bfloat16(), torch.zeros(3, 32), id="mixed-dtypes"),
        pytest.param(torch.ones(3, 64), torch.zeros(96), id="flat"),
    ],
)
def test_swiglu_refuses_what_it_would_misread(swiglu, gate_up, out, device):
    out = to(device, out)
    with pytest.raises(KernelInputError, match=r"swiglu\(gate_up \["):
        swiglu(to(device, gate_up), out=out)
    assert (out == 0).all()
