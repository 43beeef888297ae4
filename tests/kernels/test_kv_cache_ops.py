"""update_kv_buffer and update_kv_index: rows are read back through the index, and all others must be as they were."""

import pytest
import torch

from rapid_llm.errors import KernelInputError
from tests import reference
from tests.kernels.kv_pools import int32, rows_with_content, zero_pool
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to

INT32_MAX = (1 << 31) - 1

CASES = [
    pytest.param(1, 3, 64, id="decode-single-token"),
    pytest.param(7, 5, 80, id="ragged-count"),
    pytest.param(65, 2, 96, id="one-past-a-tile"),
]


def tokens(num_tokens, num_kv_heads, head_dim, device, dtype=torch.float32):
    shape = (num_tokens, num_kv_heads, head_dim)
    return torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype)


@each_row_of("update_kv_buffer")
def test_update_kv_buffer_holds_over_its_whole_sweep(update_kv_buffer, device):
    assert broken_cases(update_kv_buffer, device) == []


@each_row_of("update_kv_index")
def test_update_kv_index_holds_over_its_whole_sweep(update_kv_index, device):
    assert broken_cases(update_kv_index, device) == []


@each_row_of("update_kv_buffer")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_kv_heads", "head_dim"), CASES)
def test_rows_read_back_through_shuffled_slots_and_the_others_are_untouched(
    update_kv_buffer, num_tokens, num_kv_heads, head_dim, dtype, device
):
    pool = torch.randn(200, 2 * num_kv_heads, head_dim, device=device).to(dtype)
    before = pool.clone()
    k, v = tokens(num_tokens, num_kv_heads, head_dim, device, dtype)
    slots = torch.randperm(200)[:num_tokens].to(device)

    update_kv_buffer(k, v, slots.int(), k_pool=pool[:, :num_kv_heads], v_pool=pool[:, num_kv_heads:])

    assert torch.equal(pool[slots, :num_kv_heads], k)
    assert torch.equal(pool[slots, num_kv_heads:], v)
    others = torch.ones(200, dtype=torch.bool, device=device)
    others[slots] = False
    assert torch.equal(pool[others], before[others])


@pytest.mark.case("G4")
@each_row_of("update_kv_buffer")
def test_padding_slots_are_skipped_and_the_guard_zones_hold(update_kv_buffer, device):
    rows, guard = 40, 16
    buffer = torch.full((rows + 2 * guard, 4, 64), 7.0, device=device)
    pool = buffer[guard : guard + rows]
    k, v = tokens(8, 2, 64, device)
    slots = [5, -1, 7, -1, rows - 1, rows, INT32_MAX, -(1 << 31)]

    update_kv_buffer(k, v, int32(slots, device), k_pool=pool[:, :2], v_pool=pool[:, 2:])

    for token, slot in ((0, 5), (2, 7), (4, rows - 1)):
        assert torch.equal(pool[slot, :2], k[token])
        assert torch.equal(pool[slot, 2:], v[token])
    written = torch.zeros(rows + 2 * guard, dtype=torch.bool, device=device)
    written[[guard + 5, guard + 7, guard + rows - 1]] = True
    assert (buffer[~written] == 7.0).all()


@pytest.mark.case("G4")
@each_row_of("update_kv_buffer")
@pytest.mark.parametrize("outside", [-1, -(1 << 31), 40, 41, INT32_MAX], ids=str)
def test_one_slot_outside_the_pool_is_skipped_among_good_ones(update_kv_buffer, outside, device):
    buffer = torch.full((48, 4, 64), 7.0, device=device)
    pool = buffer[4:44]
    k, v = tokens(3, 2, 64, device)
    update_kv_buffer(k, v, int32([39, outside, 0], device), k_pool=pool[:, :2], v_pool=pool[:, 2:])
    assert torch.equal(pool[[39, 0], :2], k[[0, 2]])
    assert torch.equal(pool[[39, 0], 2:], v[[0, 2]])
    assert int((buffer != 7.0).flatten(1).any(dim=1).sum()) == 2


@pytest.mark.case("G5")
@each_row_of("update_kv_buffer")
def test_padding_of_a_full_pool_changes_no_live_row(update_kv_buffer, device):
    pool = torch.randn(16, 4, 64, device=device)
    before = pool.clone()
    k, v = tokens(4, 2, 64, device)
    update_kv_buffer(k, v, int32([-1, -1, -1, -1], device), k_pool=pool[:, :2], v_pool=pool[:, 2:])
    assert torch.equal(pool, before)


@pytest.mark.case("G6")
@each_row_of("update_kv_buffer")
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_head_views_of_a_fused_projection_carry_no_neighbour_along(update_kv_buffer, head_dim, device):
    fused = torch.full((3, 2 * 2 * (head_dim + 8)), float("nan"), device=device).view(3, 4, head_dim + 8)
    fused[..., :head_dim] = torch.randn(3, 4, head_dim, device=device)  # NaN just behind each head
    k, v = fused[:, :2, :head_dim], fused[:, 2:, :head_dim]
    k_pool, v_pool = torch.zeros(9, 2, head_dim, device=device), torch.zeros(9, 2, head_dim, device=device)
    update_kv_buffer(k, v, int32([8, 0, 4], device), k_pool=k_pool, v_pool=v_pool)
    assert torch.equal(k_pool[[8, 0, 4]], k)
    assert torch.equal(v_pool[[8, 0, 4]], v)
    assert not k_pool.isnan().any()
    assert not v_pool.isnan().any()


@pytest.mark.case("A1")
@each_row_of("update_kv_buffer")
def test_rows_past_two_to_the_31_elements_are_written_where_they_belong(update_kv_buffer, device):
    """2,048 elements a row: row 1,048,576 starts at element 2**31. A 32-bit offset lands before the pool."""
    pool = zero_pool(1_048_580, 8, 128, device)
    slots = [1_048_576, 0, 1_048_579, 1_048_575]
    k, v = tokens(4, 8, 128, device, torch.bfloat16)
    update_kv_buffer(k, v, int32(slots, device), k_pool=pool[:, :8], v_pool=pool[:, 8:])
    for token, slot in enumerate(slots):
        assert torch.equal(pool[slot, :8], k[token])
        assert torch.equal(pool[slot, 8:], v[token])
    assert rows_with_content(pool) == sorted(slots)


@pytest.mark.case("G13")
@each_row_of("update_kv_buffer")
def test_no_tokens_change_nothing(update_kv_buffer, device):
    pool = torch.randn(4, 4, 64, device=device)
    before = pool.clone()
    k, v = tokens(0, 2, 64, device)
    assert update_kv_buffer(k, v, int32([], device), k_pool=pool[:, :2], v_pool=pool[:, 2:]) is None
    assert torch.equal(pool, before)


@pytest.mark.case("G11")
@each_row_of("update_kv_buffer")
@pytest.mark.parametrize(
    ("k", "slots", "pool"),
    [
        pytest.param(torch.ones(3, 2, 128)[..., ::2], torch.zeros(3).int(), torch.zeros(9, 2, 64), id="every-other-entry"),
        pytest.param(torch.ones(3, 64, 2).transpose(1, 2), torch.zeros(3).int(), torch.zeros(9, 2, 64), id="transposed"),
        pytest.param(torch.ones(3, 2, 64), torch.zeros(3).long(), torch.zeros(9, 2, 64), id="int64-slots"),
        pytest.param(torch.ones(3, 2, 64), torch.zeros(2).int(), torch.zeros(9, 2, 64), id="a-slot-short"),
        pytest.param(torch.ones(3, 2, 64), torch.zeros(3).int(), torch.zeros(9, 2, 64).half(), id="mixed-dtypes"),
        pytest.param(torch.ones(3, 2, 64), torch.zeros(3).int(), torch.zeros(9, 1, 64), id="heads"),
    ],
)
def test_update_kv_buffer_refuses_what_it_would_misread(update_kv_buffer, k, slots, pool, device):
    k, k_pool, v_pool = to(device, k), to(device, pool), to(device, pool)
    with pytest.raises(KernelInputError, match=r"update_kv_buffer\(k \["):
        update_kv_buffer(k, k, to(device, slots), k_pool=k_pool, v_pool=v_pool)
    assert (k_pool == 0).all()
    assert (v_pool == 0).all()


@each_row_of("update_kv_index")
def test_entries_land_in_a_view_of_a_wider_table_and_nowhere_else(update_kv_index, device):
    wide = torch.full((6, 20), -5, dtype=torch.int32, device=device)
    table = wide[1:5, 3:13]
    rows, columns, pages = int32([3, 0, 2], device), int32([9, 0, 4], device), int32([11, 0, INT32_MAX], device)
    expected = reference.update_kv_index(table, rows, columns, pages)

    update_kv_index(table, rows, columns, pages)

    assert torch.equal(table, expected)
    assert int((wide != -5).sum()) == 3
    assert (table[3, 9], table[0, 0], table[2, 4]) == (11, 0, INT32_MAX)


@pytest.mark.case("G4")
@each_row_of("update_kv_index")
@pytest.mark.parametrize(
    ("row", "column"),
    [(-1, 0), (0, -1), (4, 0), (0, 10), (INT32_MAX, 0), (0, INT32_MAX), (-(1 << 31), -(1 << 31))],
    ids=lambda value: str(value),
)
def test_an_entry_outside_the_table_is_skipped(update_kv_index, row, column, device):
    wide = torch.full((8, 30), -5, dtype=torch.int32, device=device)
    update_kv_index(wide[2:6, 10:20], int32([row, 1], device), int32([column, 1], device), int32([7, 8], device))
    assert wide[3, 11] == 8
    assert int((wide != -5).sum()) == 1


@pytest.mark.case("G13")
@each_row_of("update_kv_index")
def test_no_entries_change_nothing(update_kv_index, device):
    table, none = int32([[1, 2], [3, 4]], device), int32([], device)
    update_kv_index(table, none, none, none)
    assert table.tolist() == [[1, 2], [3, 4]]


@each_row_of("update_kv_index")
@pytest.mark.parametrize(
    ("table", "rows", "columns"),
    [
        pytest.param(torch.zeros(4, 4).long(), torch.zeros(2).int(), torch.zeros(2).int(), id="int64-table"),
        pytest.param(torch.zeros(4, 4).int().t(), torch.zeros(2).int(), torch.zeros(2).int(), id="transposed-table"),
        pytest.param(torch.zeros(4, 4).int(), torch.zeros(3).int(), torch.zeros(2).int(), id="a-row-too-many"),
        pytest.param(torch.zeros(4, 4).int(), torch.zeros(2).int(), torch.zeros(4).int()[::2], id="strided-columns"),
    ],
)
def test_update_kv_index_refuses_what_it_would_misread(update_kv_index, table, rows, columns, device):
    table = to(device, table)
    with pytest.raises(KernelInputError, match=r"update_kv_index\(page_table \["):
        update_kv_index(table, to(device, rows), to(device, columns), int32([7, 7], device))
    assert (table == 0).all()
