"""gather_columns against its float64 twin, on every row that this machine runs."""

import pytest
import torch

from rapid_llm.errors import KernelInputError
from tests import reference
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to


def order_of(k, device):
    return torch.randperm(k, generator=torch.Generator().manual_seed(k)).to(device, torch.int32)


@each_row_of("gather_columns")
def test_gather_columns_holds_over_its_whole_sweep(gather_columns, device):
    assert broken_cases(gather_columns, device) == []


@each_row_of("gather_columns")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "k"), [pytest.param(1, 64, id="one-token"), pytest.param(5, 1025, id="one-past-a-tile")])
def test_gather_columns_reads_and_writes_views(gather_columns, num_tokens, k, dtype, device):
    x = torch.randn(num_tokens, k + 8, device=device).to(dtype)[:, 8:]
    buffer = torch.full((num_tokens, k + 9), 7.0, dtype=dtype, device=device)
    order = order_of(k, device)

    gather_columns(x, order, out=buffer[:, :k])

    assert torch.equal(buffer[:, :k].double(), reference.gather_columns(x, order))
    assert (buffer[:, k:] == 7.0).all()


@pytest.mark.case("G13")
@each_row_of("gather_columns")
def test_gather_columns_of_no_tokens_is_empty(gather_columns, device):
    out = torch.empty(0, 8, device=device)
    assert gather_columns(torch.ones(0, 8, device=device), order_of(8, device), out=out).shape == (0, 8)


@each_row_of("gather_columns")
def test_a_column_that_is_no_number_stays_where_it_is_sent(gather_columns, device):
    x = torch.ones(2, 16, device=device)
    x[:, 3], x[1, 5] = float("nan"), float("inf")
    order = order_of(16, device)
    out = gather_columns(x, order, out=torch.empty_like(x))
    assert torch.equal(out.isnan(), x.isnan()[:, order.long()])
    assert torch.equal(out.isinf(), x.isinf()[:, order.long()])


@each_row_of("gather_columns")
@pytest.mark.parametrize(
    ("x", "order", "out"),
    [
        pytest.param(torch.ones(3, 8), torch.arange(8), torch.zeros(3, 8), id="int64-order"),
        pytest.param(torch.ones(3, 8), torch.arange(7, dtype=torch.int32), torch.zeros(3, 8), id="short-order"),
        pytest.param(torch.ones(3, 8), torch.arange(16, dtype=torch.int32)[::2], torch.zeros(3, 8), id="every-other-id"),
        pytest.param(torch.ones(3, 8), torch.arange(8, dtype=torch.int32), torch.zeros(8, 3).t(), id="transposed-out"),
        pytest.param(torch.ones(3, 8).half(), torch.arange(8, dtype=torch.int32), torch.zeros(3, 8), id="mixed-dtypes"),
    ],
)
def test_gather_columns_refuses_what_it_would_misread(gather_columns, x, order, out, device):
    out = to(device, out)
    with pytest.raises(KernelInputError, match=r"gather_columns\(x \["):
        gather_columns(to(device, x), to(device, order), out=out)
    assert (out == 0).all()
