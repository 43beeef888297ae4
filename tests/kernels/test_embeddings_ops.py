"""vocab_embedding against its float64 twin, on every row that this machine runs."""

import pytest
import torch

from rapid_llm.errors import KernelInputError
from tests import reference
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to

CASES = [
    pytest.param(1, 257, 64, id="decode-single-token"),
    pytest.param(7, 1000, 1000, id="ragged-width"),
    pytest.param(3, 513, 1025, id="one-past-a-tile"),
]


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@each_row_of("vocab_embedding")
def test_vocab_embedding_holds_over_its_whole_sweep(vocab_embedding, device):
    assert broken_cases(vocab_embedding, device) == []


@each_row_of("vocab_embedding")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "vocab_size", "hidden_size"), CASES)
def test_vocab_embedding_copies_rows_into_a_view(vocab_embedding, num_tokens, vocab_size, hidden_size, dtype, device):
    weight = torch.randn(vocab_size, hidden_size, device=device).to(dtype)
    ids = int32([vocab_size - 1, 0, 5, 5, 1, 2, 3][:num_tokens], device)
    buffer = torch.full((num_tokens, hidden_size + 9), 7.0, dtype=dtype, device=device)

    vocab_embedding(ids, weight, out=buffer[:, :hidden_size])

    assert torch.equal(buffer[:, :hidden_size].double(), reference.vocab_embedding(ids, weight))
    assert (buffer[:, hidden_size:] == 7.0).all()


@each_row_of("vocab_embedding")
def test_vocab_embedding_reads_a_table_that_is_stored_transposed(vocab_embedding, device):
    stored = torch.randn(64, 257, device=device)
    ids = int32([256, 3, 3], device)
    out = torch.empty(3, 64, device=device)
    vocab_embedding(ids, stored.t(), out=out)
    assert torch.equal(out, stored.t()[ids.long()])


@each_row_of("vocab_embedding")
def test_a_padding_id_writes_zeros_even_where_the_table_holds_nan(vocab_embedding, device):
    weight = torch.full((4, 8), float("nan"), device=device)
    weight[2] = 1.0
    out = torch.empty(3, 8, device=device)
    vocab_embedding(int32([-1, 2, -1], device), weight, out=out)
    assert out.tolist() == [[0.0] * 8, [1.0] * 8, [0.0] * 8]


@pytest.mark.case("G13")
@each_row_of("vocab_embedding")
def test_vocab_embedding_of_no_tokens_is_empty(vocab_embedding, device):
    out = torch.empty(0, 8, device=device)
    assert vocab_embedding(int32([], device), torch.ones(4, 8, device=device), out=out).shape == (0, 8)


@each_row_of("vocab_embedding")
@pytest.mark.parametrize(
    ("ids", "weight", "out"),
    [
        pytest.param(torch.zeros(3, dtype=torch.int64), torch.ones(4, 8), torch.zeros(3, 8), id="int64-ids"),
        pytest.param(torch.zeros(6, dtype=torch.int32)[::2], torch.ones(4, 8), torch.zeros(3, 8), id="every-other-id"),
        pytest.param(torch.zeros(3, dtype=torch.int32), torch.ones(4, 8), torch.zeros(3, 9), id="width"),
        pytest.param(torch.zeros(3, dtype=torch.int32), torch.ones(4, 8), torch.zeros(8, 3).t(), id="transposed-out"),
        pytest.param(torch.zeros(3, dtype=torch.int32), torch.ones(4, 8).half(), torch.zeros(3, 8), id="mixed-dtypes"),
    ],
)
def test_vocab_embedding_refuses_what_it_would_misread(vocab_embedding, ids, weight, out, device):
    out = to(device, out)
    with pytest.raises(KernelInputError, match=r"vocab_embedding\(ids \["):
        vocab_embedding(to(device, ids), to(device, weight), out=out)
    assert (out == 0).all()
