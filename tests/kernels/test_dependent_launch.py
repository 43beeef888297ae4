"""What a program asks for ahead of its inputs: whole pieces of 16 bytes, none of them past a row."""

# ruff: noqa: N803
import pytest
import torch
import triton
import triton.language as tl

from rapid_llm.kernels.ops.primitives.dependent_launch import first_ahead, piece_ahead, pieces_ahead

WIDTHS = (1, 15, 16, 17, 100, 512, 2048, 4104, 18_944, 1 << 20)


@triton.jit
def firsts(out_ptr, share, row_bytes, piece, PIECES: tl.constexpr):
    split = tl.program_id(0)
    tl.store(out_ptr + split, first_ahead(split * share, row_bytes, piece, PIECES))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("block_n", [1, 4, 32, 128, 256])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_no_more_is_asked_for_than_a_programs_share_of_a_row(dtype, block_n, splits):
    for width in WIDTHS:
        rows = torch.empty(3, triton.cdiv(width, 16) * 16, dtype=dtype)[:, :width]
        piece, pieces = pieces_ahead(rows, 16, block_n, splits)
        row_bytes = width * rows.element_size()
        assert piece == piece_ahead(rows, block_n, pieces, splits)
        assert piece % 16 == 0
        assert 0 <= piece * pieces * splits <= row_bytes
        assert piece * pieces * block_n <= 32 << 10
        assert piece or row_bytes < 16 * pieces * splits or 16 * pieces * block_n > 32 << 10


@pytest.mark.parametrize("steps", [1, 5, 16, 17])
@pytest.mark.parametrize("row_bytes", [1600, 2048, 2056, 9000])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_a_share_is_asked_for_within_its_row_and_from_its_beginning_where_that_can_be(row_bytes, steps, splits):
    rows = torch.empty(1, triton.cdiv(row_bytes, 16) * 16, dtype=torch.uint8)[:, :row_bytes]
    piece, pieces = pieces_ahead(rows, 1, 32, splits)
    assert piece
    share = triton.cdiv(row_bytes, steps * splits) * steps  # the last may be short, or empty and past the end
    found = torch.empty(splits, dtype=torch.int32)
    firsts[(splits,)](found, share, row_bytes, piece, PIECES=pieces)
    for split, first in enumerate(found.tolist()):
        assert first % 16 == 0
        assert 0 <= first <= row_bytes - piece * pieces
        assert first <= split * share
        assert first > split * share - 16 or first > row_bytes - piece * pieces - 16


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(torch.empty(64, 8200, dtype=torch.uint8)[:, 8:], id="off-16-bytes"),
        pytest.param(torch.empty(64, 8200, dtype=torch.uint8)[:, :8192], id="row-stride-off-16-bytes"),
        pytest.param(torch.empty(8192, 64, dtype=torch.uint8).t(), id="columns-are-dense"),
    ],
)
def test_nothing_is_asked_for_of_rows_that_do_not_lie_on_16_bytes(rows):
    assert pieces_ahead(rows, 1, 64)[0] == 0


def test_nothing_is_asked_for_where_tokens_are_many():
    rows = torch.empty(64, 8192, dtype=torch.uint8)
    assert pieces_ahead(rows, 64, 64) == (256, 2)
    assert pieces_ahead(rows, 65, 64)[0] == 0
