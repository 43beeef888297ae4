"""rope_kv_write and qk_norm_rope_kv_write against their float64 twins, on every row that this machine runs."""

import importlib

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.ops.tile_policy import Tile
from tests import reference
from tests.kernels.angles import table
from tests.kernels.kv_pools import int32, rows_with_content, zero_pool
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to

EPS = 1e-6
INT32_MAX = (1 << 31) - 1
NATIVE = [row for row in each_row_of("qk_norm_rope_kv_write").args[1] if "triton" in row.values[0].spec.requires.packages]


def projection(num_tokens, heads, kv_heads, head_dim, device, dtype=torch.float32):
    """q, k and v as views of one row a token, with NaN behind each head, and the row."""
    fused = torch.full((num_tokens, heads + 2 * kv_heads, head_dim + 8), float("nan"), device=device)
    fused[..., :head_dim] = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim, device=device)
    fused = fused.to(dtype)
    return (*fused[..., :head_dim].split([heads, kv_heads, kv_heads], dim=1), fused)


def norms(head_dim, device, dtype=torch.float32):
    return {name: torch.randn(head_dim, device=device).to(dtype) for name in ("q_weight", "k_weight")}


@each_row_of("rope_kv_write")
def test_rope_kv_write_holds_over_its_whole_sweep(rope_kv_write, device):
    assert broken_cases(rope_kv_write, device) == []


@each_row_of("qk_norm_rope_kv_write")
def test_qk_norm_rope_kv_write_holds_over_its_whole_sweep(qk_norm_rope_kv_write, device):
    assert broken_cases(qk_norm_rope_kv_write, device) == []


@pytest.mark.case("G6")
@pytest.mark.case("G11")
@each_row_of("qk_norm_rope_kv_write")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_head_views_of_a_projection_are_turned_and_written_and_nothing_else(qk_norm_rope_kv_write, head_dim, dtype, device):
    q, k, v, fused = projection(5, 3, 2, head_dim, device, dtype)
    before = fused.clone()
    pool = torch.randn(9, 4, head_dim, device=device).to(dtype)
    pools, old_pool = {"k_pool": pool[:, :2], "v_pool": pool[:, 2:]}, pool.clone()
    places = (int32([9, 0, 63, 1, 1], device), table(head_dim, device), int32([8, 0, -1, 4, 9], device))
    weights = norms(head_dim, device, dtype)
    new_q, new_k, new_v = reference.qk_norm_rope_kv_write(q, k, v, *weights.values(), *places, **pools, eps=EPS)

    assert qk_norm_rope_kv_write(q, k, v, *weights.values(), *places, **pools, eps=EPS) is None

    # fp32 maths, one rounding to the dtype; the two products may cancel
    rtol = 2e-6 + (torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0)
    torch.testing.assert_close(q.double(), new_q, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(pool[:, :2].double(), new_k, rtol=rtol, atol=1e-5)
    assert torch.equal(pool[:, 2:].double(), new_v)
    assert torch.equal(pool[[1, 2, 3, 5, 6, 7]], old_pool[[1, 2, 3, 5, 6, 7]])
    assert torch.equal(fused[:, 3:].nan_to_num(), before[:, 3:].nan_to_num())  # k and v are only read
    assert fused[..., head_dim:].isnan().all()


@each_row_of("rope_kv_write")
@each_row_of("qk_norm_rope_kv_write")
def test_at_position_zero_heads_are_normed_at_most_and_values_keep_their_bits(rope_kv_write, qk_norm_rope_kv_write, device):
    q, k, v, _ = projection(2, 3, 1, 64, device)
    before = q.clone()
    places = (int32([0, 0], device), table(64, device), int32([1, 0], device))
    pools = {"k_pool": torch.zeros(2, 1, 64, device=device), "v_pool": torch.zeros(2, 1, 64, device=device)}
    rope_kv_write(q, k, v, *places, **pools)
    assert torch.equal(q, before)
    assert torch.equal(pools["k_pool"], k.flip(0))
    assert torch.equal(pools["v_pool"], v.flip(0))

    ones = torch.ones(64, device=device)
    qk_norm_rope_kv_write(q, k, v, ones, 2 * ones, *places, **pools, eps=0.0)
    assert torch.allclose(q.square().mean(-1), torch.ones(2, 3, device=device), atol=1e-5)
    assert torch.allclose(pools["k_pool"].square().mean(-1), 4 * torch.ones(2, 1, device=device), atol=1e-5)


@pytest.mark.case("G4")
@each_row_of("rope_kv_write")
@pytest.mark.parametrize("outside", [-1, -(1 << 31), 40, 41, INT32_MAX], ids=str)
def test_a_slot_outside_the_pool_is_skipped_and_its_query_is_turned(rope_kv_write, outside, device):
    buffer = torch.full((48, 4, 64), 7.0, device=device)
    pool = buffer[4:44]
    q, k, v, _ = projection(3, 2, 2, 64, device)
    places = (int32([0, 5, 0], device), table(64, device), int32([39, outside, 0], device))
    expected, _, _ = reference.rope_kv_write(q, k, v, *places, k_pool=pool[:, :2], v_pool=pool[:, 2:])
    rope_kv_write(q, k, v, *places, k_pool=pool[:, :2], v_pool=pool[:, 2:])
    torch.testing.assert_close(q.double(), expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(pool[[39, 0], :2], k[[0, 2]])
    assert torch.equal(pool[[39, 0], 2:], v[[0, 2]])
    assert int((buffer != 7.0).flatten(1).any(dim=1).sum()) == 2


@pytest.mark.case("A1")
@each_row_of("rope_kv_write")
def test_rows_past_two_to_the_31_elements_are_written_where_they_belong(rope_kv_write, device):
    """2,048 elements a row: row 1,048,576 starts at element 2**31. A 32-bit offset lands before the pool."""
    pool = zero_pool(1_048_580, 8, 128, device)
    slots = [1_048_576, 0, 1_048_579, 1_048_575]
    q, k, v, _ = projection(4, 1, 8, 128, device, torch.bfloat16)
    places = (int32([0] * 4, device), table(128, device), int32(slots, device))
    rope_kv_write(q, k, v, *places, k_pool=pool[:, :8], v_pool=pool[:, 8:])
    for token, slot in enumerate(slots):
        assert torch.equal(pool[slot, :8], k[token])
        assert torch.equal(pool[slot, 8:], v[token])
    assert rows_with_content(pool) == sorted(slots)


@pytest.mark.parametrize("qk_norm_rope_kv_write", NATIVE)
@pytest.mark.parametrize("tile", [Tile(1, 64), Tile(2, 64), Tile(8, 128), Tile(32, 64)], ids=str)
def test_any_tile_norms_and_turns_whole_heads(qk_norm_rope_kv_write, tile, device, monkeypatch):
    name = qk_norm_rope_kv_write.spec.target.partition(":")[0]
    monkeypatch.setattr(importlib.import_module(name), "resolve_tiles", lambda *_, **__: tile)
    q, k, v, _ = projection(3, 7, 5, 112, device)
    places = (int32([3, 1, 60], device), table(112, device), int32([2, 0, 1], device))
    pools = {"k_pool": torch.zeros(3, 5, 112, device=device), "v_pool": torch.zeros(3, 5, 112, device=device)}
    weights = norms(112, device)
    expected = reference.qk_norm_rope_kv_write(q, k, v, *weights.values(), *places, **pools, eps=EPS)
    qk_norm_rope_kv_write(q, k, v, *weights.values(), *places, **pools, eps=EPS)
    for got, wanted in zip((q, *pools.values()), expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=1e-5)


@pytest.mark.case("G13")
@each_row_of("rope_kv_write")
def test_no_tokens_change_nothing(rope_kv_write, device):
    q, k, v, _ = projection(0, 2, 1, 64, device)
    pool = torch.randn(4, 2, 64, device=device)
    before = pool.clone()
    places = (int32([], device), table(64, device), int32([], device))
    assert rope_kv_write(q, k, v, *places, k_pool=pool[:, :1], v_pool=pool[:, 1:]) is None
    assert torch.equal(pool, before)


@pytest.mark.case("G11")
@each_row_of("qk_norm_rope_kv_write")
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"q": torch.ones(2, 3, 128)[..., ::2]}, id="every-other-entry"),
        pytest.param({"k": torch.ones(2, 64, 1).transpose(1, 2)[..., :32]}, id="narrower-keys"),
        pytest.param({"v": torch.ones(2, 2, 64)}, id="more-values-than-keys"),
        pytest.param({"positions": torch.zeros(2, dtype=torch.int64)}, id="int64-positions"),
        pytest.param({"positions": torch.zeros(3, dtype=torch.int32)}, id="one-position-too-many"),
        pytest.param({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, id="int64-slots"),
        pytest.param({"cos_sin": torch.ones(64, 32)}, id="a-table-of-half-heads"),
        pytest.param({"k_weight": torch.ones(32)}, id="a-weight-of-half-heads"),
        pytest.param({"q_weight": torch.ones(64).half()}, id="mixed-dtypes"),
        pytest.param({"k_pool": torch.zeros(4, 2, 64)}, id="a-pool-of-more-heads"),
        pytest.param({"v_pool": torch.zeros(4, 1, 64).bfloat16()}, id="a-pool-of-another-dtype"),
    ],
)
def test_what_would_be_misread_is_refused_and_nothing_is_written(qk_norm_rope_kv_write, changed, device):
    arguments = {
        "q": torch.ones(2, 3, 64),
        "k": torch.ones(2, 1, 64),
        "v": torch.ones(2, 1, 64),
        "q_weight": torch.ones(64),
        "k_weight": torch.ones(64),
        "positions": torch.zeros(2, dtype=torch.int32),
        "cos_sin": torch.ones(64, 64),
        "slot_mapping": torch.tensor([0, 1], dtype=torch.int32),
        "k_pool": torch.zeros(4, 1, 64),
        "v_pool": torch.zeros(4, 1, 64),
    }
    arguments = {name: to(device, tensor) for name, tensor in (arguments | changed).items()}
    with pytest.raises(KernelInputError, match=r"qk_norm_rope_kv_write\(q \["):
        qk_norm_rope_kv_write(**arguments, eps=EPS)
    assert (arguments["q"] == 1).all()
    assert not arguments["k_pool"].any()
    assert not arguments["v_pool"].any()
