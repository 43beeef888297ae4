"""rope against its float64 twin, on every row that this machine runs."""

import pytest
import torch

from rapid_llm.errors import KernelInputError
from tests import reference
from tests.kernels.angles import table
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to


def positions_of(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@each_row_of("rope")
def test_rope_holds_over_its_whole_sweep(rope, device):
    assert broken_cases(rope, device) == []


@pytest.mark.case("G6")
@pytest.mark.case("G11")
@each_row_of("rope")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_rope_turns_head_views_of_a_fused_projection_and_nothing_else(rope, head_dim, dtype, device):
    heads, kv_heads = 3, 1
    fused = torch.randn(5, (heads + 2 * kv_heads) * head_dim + 3, device=device).to(dtype)
    fused[:, (heads + kv_heads) * head_dim :] = float("nan")  # just behind the last head
    q = fused[:, : heads * head_dim].view(5, heads, head_dim)
    k = fused[:, heads * head_dim : (heads + kv_heads) * head_dim].view(5, kv_heads, head_dim)
    positions, cos_sin = positions_of([9, 0, 63, 1, 1], device), table(head_dim, device)
    expected_q, expected_k = reference.rope(q, k, positions, cos_sin)

    rope(q, k, positions, cos_sin)

    # fp32 maths, one rounding to the dtype; the two products may cancel
    rtol = 2e-6 + (torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0)
    torch.testing.assert_close(q.double(), expected_q, rtol=rtol, atol=2e-6)
    torch.testing.assert_close(k.double(), expected_k, rtol=rtol, atol=2e-6)
    assert fused[:, (heads + kv_heads) * head_dim :].isnan().all()


@each_row_of("rope")
def test_rope_leaves_the_entries_past_rotary_dim(rope, device):
    q, k = torch.randn(4, 2, 96, device=device), torch.randn(4, 2, 96, device=device)
    q_before, k_before = q.clone(), k.clone()
    rope(q, k, positions_of([3, 2, 1, 5], device), table(48, device))
    assert torch.equal(q[..., 48:], q_before[..., 48:])
    assert torch.equal(k[..., 48:], k_before[..., 48:])
    assert not torch.equal(q[..., :48], q_before[..., :48])


@each_row_of("rope")
def test_rope_at_position_zero_changes_nothing(rope, device):
    q, k = torch.randn(2, 3, 64, device=device), torch.randn(2, 1, 64, device=device)
    q_before, k_before = q.clone(), k.clone()
    rope(q, k, positions_of([0, 0], device), table(64, device))
    assert torch.equal(q, q_before)
    assert torch.equal(k, k_before)


@each_row_of("rope")
def test_the_product_of_two_turned_heads_depends_on_their_distance_only(rope, device):
    q = torch.randn(1, 1, 64, device=device).expand(3, 1, 64).clone()
    k = torch.randn(1, 1, 64, device=device).expand(3, 1, 64).clone()
    turned = []
    for shift in (0, 17):
        moved_q, moved_k = q.clone(), k.clone()
        rope(moved_q, torch.zeros_like(k), positions_of([shift + 4] * 3, device), table(64, device))
        rope(torch.zeros_like(q), moved_k, positions_of([shift, shift + 1, shift + 4], device), table(64, device))
        turned.append((moved_q.double() * moved_k.double()).sum(-1))
    torch.testing.assert_close(turned[0], turned[1], rtol=1e-5, atol=1e-4)  # 64 fp32 products of size 1
    assert (turned[0].diff(dim=0).abs() > 1e-3).all()


@pytest.mark.case("G13")
@each_row_of("rope")
def test_rope_of_no_tokens_returns(rope, device):
    empty = torch.empty(0, 2, 64, device=device)
    assert rope(empty, empty.clone(), positions_of([], device), table(64, device)) is None


@pytest.mark.case("G11")
@each_row_of("rope")
@pytest.mark.parametrize(
    ("q", "positions", "rotary_dim"),
    [
        pytest.param(torch.ones(2, 3, 128)[..., ::2], torch.zeros(2, dtype=torch.int32), 64, id="every-other-entry"),
        pytest.param(torch.ones(2, 64, 3).transpose(1, 2), torch.zeros(2, dtype=torch.int32), 64, id="transposed"),
        pytest.param(torch.ones(2, 3, 64), torch.zeros(2, dtype=torch.int64), 64, id="int64-positions"),
        pytest.param(torch.ones(2, 3, 64), torch.zeros(3, dtype=torch.int32), 64, id="one-position-too-many"),
        pytest.param(torch.ones(2, 3, 64), torch.zeros(2, dtype=torch.int32), 66, id="rotary-dim-past-the-head"),
        pytest.param(torch.ones(2, 3, 64).half(), torch.zeros(2, dtype=torch.int32), 64, id="mixed-dtypes"),
    ],
)
def test_rope_refuses_what_it_would_misread(rope, q, positions, rotary_dim, device):
    q, k = to(device, q), torch.ones(2, 1, 64, device=device)
    with pytest.raises(KernelInputError, match=r"rope\(q \["):
        rope(q, k, to(device, positions), table(rotary_dim, device))
    assert (q == 1).all()
    assert (k == 1).all()


@each_row_of("rope")
def test_q_and_k_of_two_allocations_that_touch_are_not_taken_for_one(rope, device):
    memory = bytearray(3 * 64 * 4)
    q = torch.frombuffer(memory, dtype=torch.float32, count=128).view(1, 2, 64)
    k = torch.frombuffer(memory, dtype=torch.float32, offset=512).as_strided((1, 1, 64), (128, 64, 1))
    if device.type != "cpu":  # allocations there begin at multiples of 512 bytes, and may touch or not
        q, k = q.to(device), k.to(device)
    q.normal_()
    k.normal_()
    expected_q, expected_k = reference.rope(q, k, positions_of([5], device), table(64, device))

    rope(q, k, positions_of([5], device), table(64, device))

    torch.testing.assert_close(q.double(), expected_q, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(k.double(), expected_k, rtol=2e-6, atol=2e-6)
