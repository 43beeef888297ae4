"""Offsets past 2**31 elements, and counts past the 65,535 that grid axes 1 and 2 stop at.

Every tensor sits in the middle of a larger allocation, so an address that wraps lands in memory that is mapped: what is asserted
are values, never that nothing crashed.
"""

import pytest
import torch

from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.dispatcher.ranking import missing_packages
from tests.reference import fused_moe

NATIVE = {op: [row for row in rows if not row.fallback and not missing_packages(row)] for op, rows in catalog().rows.items()}


def native_row(op):
    return pytest.mark.parametrize("kernel", [pytest.param(load_target(row), id=row.name) for row in NATIVE[op]])


def in_the_middle(*shape, fill=None, dtype=torch.bfloat16):
    """A tensor of ``shape`` with 4 GiB of mapped memory on either side."""
    guard = 2**31
    count = torch.Size(shape).numel()
    whole = torch.empty(guard + count + guard, dtype=dtype, device="cuda")
    if fill is not None:
        whole.fill_(fill)
    return whole[guard : guard + count].view(shape), whole


@pytest.mark.case("A1")
@native_row("update_kv_buffer")
def test_slots_past_int32_offsets_are_written_exactly_and_no_others(kernel):
    heads, dim, rows = 8, 128, 1_048_580
    pool, whole = in_the_middle(rows, 2 * heads, dim, fill=7.0)
    slots = [1_048_579, 0, 1_048_576, -1, 1_048_575, rows]
    k = torch.randn(len(slots), heads, dim, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)
    kernel(k, v, torch.tensor(slots, dtype=torch.int32, device="cuda"), k_pool=pool[:, :heads], v_pool=pool[:, heads:])
    for i in (0, 1, 2, 4):
        assert torch.equal(pool[slots[i], :heads], k[i])
        assert torch.equal(pool[slots[i], heads:], v[i])
        pool[slots[i]] = 7.0
    assert all((part == 7.0).all() for part in whole.split(2**28))


@pytest.mark.case("A1")
@pytest.mark.case("A2")
@native_row("flash_decoding")
def test_decode_reads_pages_on_both_sides_of_the_boundary(kernel):
    heads, dim, page_size, pages = 8, 128, 16, 65_600
    pool, _ = in_the_middle(pages * page_size, 2 * heads, dim, fill=float("nan"))
    boundary = 2**31 // (2 * heads * dim * page_size)
    chosen = [boundary - 1, boundary + 3, 0, boundary, pages - 1, boundary + 1]
    table = torch.tensor([chosen], dtype=torch.int32, device="cuda")
    for page in chosen:
        pool[page * page_size : (page + 1) * page_size].normal_()
    q = torch.randn(1, 32, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    length = len(chosen) * page_size - 3
    kernel(
        q,
        pool[:, :heads],
        pool[:, heads:],
        table,
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        torch.tensor([length], dtype=torch.int32, device="cuda"),
        out=out,
        page_size=page_size,
        sm_scale=dim**-0.5,
    )
    rows = torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in chosen])[:length].cuda()
    expected = dense_attention(q[0], pool[rows, :heads], pool[rows, heads:], dim**-0.5)
    torch.testing.assert_close(out[0].double(), expected, rtol=0, atol=1e-2)


@pytest.mark.case("A2")
@native_row("flashattention2_nopad")
def test_prefill_reads_pages_on_both_sides_of_the_boundary(kernel):
    heads, dim, page_size, pages = 8, 128, 16, 65_600
    pool, _ = in_the_middle(pages * page_size, 2 * heads, dim, fill=float("nan"))
    boundary = 2**31 // (2 * heads * dim * page_size)
    chosen = [boundary, 0, boundary - 1, pages - 1, boundary + 1, boundary + 7]
    for page in chosen:
        pool[page * page_size : (page + 1) * page_size].normal_()
    tokens, length = 40, len(chosen) * page_size
    q = torch.randn(tokens, 32, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    kernel(
        q,
        pool[:, :heads],
        pool[:, heads:],
        torch.tensor([chosen], dtype=torch.int32, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        torch.tensor([length], dtype=torch.int32, device="cuda"),
        out=out,
        page_size=page_size,
        sm_scale=dim**-0.5,
        max_seqlen_q=tokens,
    )
    rows = torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in chosen]).cuda()
    for i in (0, 1, 15, 16, tokens - 1):
        seen = rows[: length - tokens + i + 1]
        expected = dense_attention(q[i], pool[seen, :heads], pool[seen, heads:], dim**-0.5)
        torch.testing.assert_close(out[i].double(), expected, rtol=0, atol=1e-2)


def dense_attention(q, k, v, sm_scale):
    """One query [Hq, D] over k, v [L, Hkv, D] in float64."""
    group = q.shape[0] // k.shape[1]
    k, v = (part.double().repeat_interleave(group, dim=1) for part in (k, v))
    weights = torch.einsum("hd,lhd->hl", q.double(), k).mul(sm_scale).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, v)


@pytest.mark.case("A7")
@native_row("swiglu")
def test_the_last_rows_of_a_huge_swiglu_are_right(kernel):
    tokens, d = 75_000, 28_672
    gate_up, _ = in_the_middle(tokens, 2 * d, fill=1.0)
    gate_up[-2:].normal_()
    out = torch.full((tokens, d), float("nan"), device="cuda", dtype=torch.bfloat16)
    kernel(gate_up, out=out)
    gate, up = gate_up[-2:].double().chunk(2, dim=1)
    torch.testing.assert_close(out[-2:].double(), gate * gate.sigmoid() * up, rtol=1e-2, atol=1e-2)
    assert (out[:-2] == out[0, 0]).all()


@pytest.mark.case("A7")
@native_row("rms_norm")
def test_the_last_rows_of_a_huge_norm_are_right(kernel):
    tokens, d = 524_300, 4096
    x, _ = in_the_middle(tokens, d, fill=1.0)
    x[-2:].normal_()
    weight = torch.randn(d, device="cuda", dtype=torch.bfloat16)
    kernel(x, weight, out=x, eps=1e-5)
    assert torch.isfinite(x[-2:]).all()
    torch.testing.assert_close(x[0].double(), weight.double() * (1 + 1e-5) ** -0.5, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(x[-3], x[0])
    assert not torch.equal(x[-1], x[0])


@pytest.mark.case("A7")
@native_row("vocab_embedding")
def test_rows_past_int32_offsets_of_a_table_are_found(kernel):
    vocab, hidden = 262_200, 8192 + 16
    table, _ = in_the_middle(vocab, hidden, fill=0.0)
    ids = torch.tensor([vocab - 1, 0, -1, 261_632, 261_633], dtype=torch.int32, device="cuda")
    for token in (0, 261_632, 261_633, vocab - 1):
        table[token].normal_()
    out = torch.full((5, hidden), float("nan"), device="cuda", dtype=torch.bfloat16)
    kernel(ids, table, out=out)
    for row, token in enumerate(ids.tolist()):
        expected = torch.zeros(hidden, device="cuda", dtype=torch.bfloat16) if token < 0 else table[token]
        assert torch.equal(out[row], expected)


@pytest.mark.case("A4")
@pytest.mark.parametrize(("hidden", "inner"), [pytest.param(64, 1536, id="activations"), pytest.param(1536, 64, id="results")])
@native_row("fused_moe")
def test_the_last_of_many_tokens_of_experts_are_right(kernel, hidden, inner):
    """174,800 tokens of 8 experts each: their rows of 1,536 pass 2**31 elements."""
    tokens, experts, top_k = 174_800, 8, 8
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    gate_up, down = _experts(experts, hidden, inner)
    ids = torch.rand(tokens, experts, device="cuda").argsort(1).int()
    weights = torch.rand(tokens, top_k, device="cuda")
    out = torch.full_like(x, float("nan"))
    kernel(x, gate_up, down, ids, weights, out=out)
    assert out.isfinite().all()
    for part in (slice(0, 16), slice(87_380, 87_396), slice(tokens - 16, tokens)):
        expected = fused_moe(x[part], gate_up, down, ids[part], weights[part])
        torch.testing.assert_close(out[part].double(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.case("A4")
@pytest.mark.parametrize("tokens", [pytest.param(1, id="pairs-as-they-are"), pytest.param(40, id="pairs-by-expert")])
@native_row("fused_moe")
def test_experts_past_int32_offsets_are_found(kernel, tokens):
    experts, hidden, inner = 520, 1024, 2048
    gate_up, _ = in_the_middle(experts, 2 * inner, hidden, fill=float("nan"))
    down, _ = in_the_middle(experts, hidden, inner, fill=float("nan"))
    chosen = [519, 0, 512, 511]
    for expert in chosen:
        gate_up[expert], down[expert] = (part[0] for part in _experts(1, hidden, inner))
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([[*chosen, -1, 520]] * tokens, dtype=torch.int32, device="cuda")
    weights, out = torch.rand(tokens, 6, device="cuda"), torch.full_like(x, float("nan"))
    kernel(x, gate_up, down, ids, weights, out=out)
    few = torch.tensor([[0, 1, 2, 3]] * tokens, dtype=torch.int32, device="cuda")
    expected = fused_moe(x, gate_up[chosen], down[chosen], few, weights[:, :4])
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def _experts(count, hidden, inner):
    gate_up, down = (torch.randn(count, n, k, device="cuda") / k**0.5 for n, k in ((2 * inner, hidden), (hidden, inner)))
    return gate_up.bfloat16(), down.bfloat16()


TOKENS = [65_535, 65_536, 131_073]


@pytest.mark.case("B1")
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    "op",
    [
        "swiglu",
        "rms_norm",
        "add_rms_norm",
        "rope",
        "vocab_embedding",
        "update_kv_buffer",
        "dense_gemm",
        "fused_moe",
        "route_experts",
    ],
)
def test_token_counts_past_the_grid_limit(op, tokens):
    for row in NATIVE[op]:
        check = _CHECKS[op]
        check(load_target(row), tokens)


def _swiglu(kernel, tokens):
    x = torch.randn(tokens, 32, device="cuda", dtype=torch.bfloat16)
    out = torch.full((tokens, 16), float("nan"), device="cuda", dtype=torch.bfloat16)
    kernel(x, out=out)
    gate, up = x.float().chunk(2, dim=1)
    torch.testing.assert_close(out.float(), gate * gate.sigmoid() * up, rtol=1e-2, atol=1e-2)


def _normed(x, weight):
    return x.float() * x.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt() * weight.float()


def _rms_norm(kernel, tokens):
    x, weight = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16), torch.randn(64, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(x, float("nan"))
    kernel(x, weight, out=out, eps=1e-5)
    torch.testing.assert_close(out.float(), _normed(x, weight), rtol=2e-2, atol=2e-2)


def _add_rms_norm(kernel, tokens):
    x, weight = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16), torch.randn(64, device="cuda", dtype=torch.bfloat16)
    residual, out = torch.randn_like(x), torch.full_like(x, float("nan"))
    total = residual + x
    kernel(x, residual, weight, out=out, eps=1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(out.float(), _normed(total, weight), rtol=2e-2, atol=2e-2)


def _rope(kernel, tokens):
    q, k = (torch.randn(tokens, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (2, 1))
    before = q.float()
    cos_sin = torch.randn(512, 64, device="cuda")
    positions = (torch.arange(tokens, device="cuda") % 512).int()
    kernel(q, k, positions, cos_sin)
    cos, sin = cos_sin[positions.long()][:, None].chunk(2, dim=2)
    first, second = before.chunk(2, dim=2)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
    torch.testing.assert_close(q.float(), expected, rtol=2e-2, atol=2e-2)


def _vocab_embedding(kernel, tokens):
    table = torch.randn(1000, 32, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 1000, (tokens,), device="cuda", dtype=torch.int32)
    out = torch.full((tokens, 32), float("nan"), device="cuda", dtype=torch.bfloat16)
    kernel(ids, table, out=out)
    assert torch.equal(out, table[ids.long()])


def _update_kv_buffer(kernel, tokens):
    pool = torch.zeros(tokens + 16, 4, 16, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, 2, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slots = torch.randperm(tokens + 16, device="cuda")[:tokens].int()
    kernel(k, v, slots, k_pool=pool[:, :2], v_pool=pool[:, 2:])
    assert torch.equal(pool[slots.long()], torch.cat((k, v), dim=1))


def _dense_gemm(kernel, tokens):
    x, weight = (torch.randn(n, 32, device="cuda", dtype=torch.bfloat16) for n in (tokens, 48))
    out = torch.full((tokens, 48), float("nan"), device="cuda", dtype=torch.bfloat16)
    kernel(x, weight, out=out)
    torch.testing.assert_close(out.float(), x.float() @ weight.float().T, rtol=2e-2, atol=5e-2)


def _fused_moe(kernel, tokens):
    x = torch.randn(tokens, 32, device="cuda", dtype=torch.bfloat16)
    gate_up, down = _experts(4, 32, 16)
    ids, weights = torch.randint(0, 4, (tokens, 2), device="cuda", dtype=torch.int32), torch.rand(tokens, 2, device="cuda")
    out = torch.full_like(x, float("nan"))
    kernel(x, gate_up, down, ids, weights, out=out)
    expected = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(4):
        gate, up = (x.float() @ gate_up[expert].float().T).chunk(2, dim=1)
        share = (weights * (ids == expert)).sum(1, keepdim=True)
        expected += share * ((gate * gate.sigmoid() * up) @ down[expert].float().T)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-1)


def _route_experts(kernel, tokens):
    logits = torch.randn(tokens, 8, device="cuda")
    ids = torch.full((tokens, 2), -1, device="cuda", dtype=torch.int32)
    weights = torch.full((tokens, 2), float("nan"), device="cuda")
    kernel(logits, out_ids=ids, out_weights=weights)
    values, chosen = logits.topk(2, dim=1)
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights, values.softmax(1))


_CHECKS = {
    "fused_moe": _fused_moe,
    "route_experts": _route_experts,
    "swiglu": _swiglu,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rope": _rope,
    "vocab_embedding": _vocab_embedding,
    "update_kv_buffer": _update_kv_buffer,
    "dense_gemm": _dense_gemm,
}
