"""Pairs of tokens and experts in tiles, and the grouped product over them: the parts of the Triton rows of the moe family."""

import contextlib
import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="runs Triton kernels")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("runs kernels in Triton's interpreter, or on a GPU", allow_module_level=True)

from rapid_llm.kernels.ops.moe import fused_moe as wrappers
from rapid_llm.kernels.ops.moe.alignment import pairs_by_expert
from rapid_llm.kernels.ops.moe.grouped_product import ExpertWeights, Routes, grouped_product
from rapid_llm.kernels.ops.tile_policy import Tile
from rapid_llm.kernels.testing.sanitizer import sanitize
from tests import reference

TILE = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
needs_interpreter = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="touches memory that nobody has")


def checked(seed=0):
    """The sanitizer where kernels are interpreted, with programs in an order of this seed."""
    return sanitize(seed) if os.environ.get("TRITON_INTERPRET") == "1" else contextlib.nullcontext()


def expected_plan(ids, num_experts, block_m):
    """Pairs by expert, stable, and tiles as (expert, first place, past the last place)."""
    flat, pairs, tiles = ids.cpu().flatten(), [], []
    for expert in range(num_experts):
        own = (flat == expert).nonzero()[:, 0].tolist()
        tiles += [[expert, len(pairs) + row, len(pairs) + len(own)] for row in range(0, len(own), block_m)]
        pairs += own
    return pairs, tiles


@pytest.mark.case("G4")
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "block_m"),
    [
        pytest.param(1, 1, 4, 16, id="one-pair"),
        pytest.param(43, 3, 5, 16, id="one-past-a-step"),
        pytest.param(32, 8, 60, 16, id="all-that-one-program-places"),
        pytest.param(257, 1, 512, 32, id="one-more-than-one-program-places"),
        pytest.param(50, 10, 1000, 64, id="many-experts"),
        pytest.param(4099, 4, 3, 128, id="chunks-of-two-steps"),
    ],
)
@pytest.mark.parametrize("spoilt", [pytest.param(False, id="sound"), pytest.param(True, id="foreign-ids")])
def test_pairs_come_by_expert_in_their_order_and_tiles_cover_them(tokens, top_k, num_experts, block_m, spoilt, device):
    ids = torch.randint(0, num_experts, (tokens, top_k + 2), dtype=torch.int32, device=device)[:, 1 : top_k + 1]
    if spoilt:
        foreign = torch.tensor([-1, num_experts, -(2**31), 2**31 - 1], dtype=torch.int32, device=device)
        ids[::3] = foreign[torch.randint(0, 4, ids[::3].shape, device=device)]
    with checked():
        pairs, tiles = pairs_by_expert(ids, num_experts, block_m)

    wanted_pairs, wanted_tiles = expected_plan(ids, num_experts, block_m)
    assert pairs[: len(wanted_pairs)].tolist() == wanted_pairs
    assert tiles[: len(wanted_tiles)].tolist() == wanted_tiles
    assert (tiles[len(wanted_tiles) :, 0] == -1).all()


@pytest.mark.parametrize("counts", [[33, 1, 0, 16], [0, 0, 0, 50], [17, 17, 17, 17], [1, 1, 1, 1]], ids=str)
def test_there_is_room_for_the_tiles_of_any_counts(counts, device):
    """Experts whose rows just begin another tile need the most."""
    ids = torch.cat([torch.full((count, 1), expert) for expert, count in enumerate(counts)]).int().to(device)
    with checked():
        _, tiles = pairs_by_expert(ids, len(counts), 16)
    wanted = expected_plan(ids, len(counts), 16)[1]
    assert tiles[: len(wanted)].tolist() == wanted


@pytest.mark.case("F1")
def test_the_same_call_gives_the_same_bits_whatever_order_programs_run_in(device):
    tokens, experts, hidden, inner = 40, 6, 48, 32
    x = torch.randn(tokens, hidden, device=device)
    gate_up = torch.randn(experts, 2 * inner, hidden, device=device)
    down = torch.randn(experts, hidden, inner, device=device)
    ids = torch.randint(-1, experts, (tokens, 3), dtype=torch.int32, device=device)
    weights = torch.rand(tokens, 3, device=device)
    results = []
    for seed in (1, 2, None):
        with checked(seed):
            results.append(wrappers.fused_moe(x, gate_up, down, ids, weights, out=torch.empty_like(x)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("tile", [Tile(16, 16, 16), Tile(64, 32, 64), Tile(128, 64, 32), Tile(32, 128, 256)], ids=str)
@pytest.mark.parametrize("group", [0, 16, 64])
def test_any_tile_keeps_rows_groups_and_gates_apart(tile, group, device, monkeypatch):
    """A tile from a store or a search may cut a group or hold several, and be larger than what it is for."""
    monkeypatch.setattr(wrappers, "resolve_tiles", lambda *_, **__: tile)
    x = torch.randn(23, 192, device=device)
    tensors = {}
    for name, (n, k) in {"gate_up": (2 * 64, 192), "down": (192, 64)}.items():
        tensors[name] = torch.randint(0, 256, (3, n, k // 2), dtype=torch.uint8, device=device)
        scales = (0.5 + torch.rand(3, n, k // group if group else 1, device=device)) / k**0.5
        scales.view(-1)[::2] /= 1000
        tensors[f"{name}_scales"] = scales
        tensors[f"{name}_zeros"] = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=device)
    routed = {
        "ids": torch.randint(0, 3, (23, 2), dtype=torch.int32, device=device),
        "weights": torch.rand(23, 2, device=device),
    }
    with checked():
        out = wrappers.fused_moe_w4a16(x, **tensors, **routed, out=torch.empty_like(x))
    expected = reference.fused_moe_w4a16(x, **tensors, **routed)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def lazy(shape, strides):
    """A view of zeros whose pages take no memory until they are touched."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.from_numpy(np.zeros(span, dtype=np.int16)).view(torch.bfloat16).as_strided(shape, strides)


FAR = 2**30 + 8  # elements: the third step of this stride is past 2**31


@needs_interpreter
@pytest.mark.case("A4")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("far", ["x", "experts", "results"])
def test_rows_and_experts_past_31_bits_are_found(far, gated):
    """The third row of x, the third expert or the third pair's result lies past 2**31 elements."""
    x = lazy((3, 32), (FAR, 1)) if far == "x" else torch.zeros(3, 32, dtype=torch.bfloat16)
    weight = lazy((3, 32, 32), (FAR, 32, 1)) if far == "experts" else torch.zeros(3, 32, 32, dtype=torch.bfloat16)
    width = 16 if gated else 32
    out = lazy((3, width), (FAR, 1)) if far == "results" else torch.zeros(3, width, dtype=torch.bfloat16)
    x.copy_(torch.randn(3, 32))
    weight.copy_(torch.randn(3, 32, 32))
    ids, weights = torch.tensor([[0], [1], [2]], dtype=torch.int32), torch.ones(3, 1)
    pairs, tiles = pairs_by_expert(ids, 3, 16)
    with sanitize():
        grouped_product(
            x, ExpertWeights("dense", weight), Routes(ids, weights, pairs, tiles, tiles.shape[0]), TILE, out=out, gated=gated
        )
    expected = torch.einsum("tk,tnk->tn", x.double(), weight.double())
    if gated:
        expected = torch.nn.functional.silu(expected[:, :16]) * expected[:, 16:]
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)
