"""Cases of the attention family: shuffled pages of a pool that holds NaN in every row that no sequence uses."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rapid_llm.kernels.ops.attention.rows import (
    FLASH_DECODING,
    FLASH_DECODING_FP8,
    FLASHATTENTION2_NOPAD,
    FLASHATTENTION2_NOPAD_FP8,
)
from rapid_llm.kernels.ops.interfaces import Contract, Sizes
from rapid_llm.kernels.reference import attention as reference
from rapid_llm.kernels.verify.buffers import Stage
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check

_SPARE_PAGES = 3
_SPARE_TABLE_ROWS = 2
_FAR = 2.0**-12  # of queries whose keys are as much larger
_LARGE = 40.0  # scores then reach several hundred: only a softmax that subtracts its maximum lives


def _prefill(
    contract: Contract,
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    hard: str | None,
) -> Case:
    stage = Stage(contract, sizes, dtype, device)
    q_lens = _ragged(sizes["num_seqs"], 0, sizes["q_len"], generator)
    prefixes = _ragged(sizes["num_seqs"], 0, sizes["kv_len"] - sizes["q_len"], generator)
    ends = torch.tensor([0, *q_lens]).cumsum(0)
    lengths = [prefix + run for prefix, run in zip(prefixes, q_lens, strict=True)]
    arguments = {
        "q": stage.place("q", _queries(int(ends[-1]), sizes, generator, hard)),
        **_placed_keys(stage, lengths, sizes, generator, _scales(contract, sizes, generator, hard)),
        "cu_seqlens_q": stage.place("cu_seqlens_q", ends),
        "seq_lens": stage.place("seq_lens", torch.tensor(lengths, dtype=torch.int32)),
        "page_size": sizes["page_size"],
        "sm_scale": sizes["head_dim"] ** -0.5,
    }
    expected = _reference(contract, arguments)
    arguments["max_seqlen_q"] = sizes["q_len"]
    return _case(stage, contract, arguments, expected, hard)


def _decode(
    contract: Contract,
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    hard: str | None,
) -> Case:
    stage = Stage(contract, sizes, dtype, device)
    lengths = _ragged(sizes["num_seqs"], 0, sizes["kv_len"], generator)
    if len(lengths) > 2:
        lengths[1] = 0  # padding
    arguments = {
        "q": stage.place("q", _queries(sizes["num_seqs"], sizes, generator, hard)),
        **_placed_keys(stage, lengths, sizes, generator, _scales(contract, sizes, generator, hard)),
        "seq_lens": stage.place("seq_lens", torch.tensor(lengths, dtype=torch.int32)),
        "page_size": sizes["page_size"],
        "sm_scale": sizes["head_dim"] ** -0.5,
    }
    return _case(stage, contract, arguments, _reference(contract, arguments), hard)


def _reference(contract: Contract, arguments: dict[str, Any]) -> torch.Tensor:
    """What the op's twin says of a case."""
    twin: Callable[..., torch.Tensor] = getattr(reference, contract.op)
    return twin(**arguments)


def _scales(contract: Contract, sizes: Sizes, generator: torch.Generator, hard: str | None) -> torch.Tensor | None:
    """Of K and of V by head [2, num_kv_heads], where the pools of the op are e4m3."""
    if all(arg.name != "k_scale" for arg in contract.tensors):
        return None
    scales = (0.5 + torch.rand(2, sizes["num_kv_heads"], generator=generator)) / 64
    if hard == "far_scales":
        scales[0] /= _FAR  # the queries make up for it
        scales[1] *= 2.0 ** (16 * (torch.arange(sizes["num_kv_heads"]) % 2) - 8)
    return scales


def _ragged(count: int, low: int, high: int, generator: torch.Generator) -> list[int]:
    """Random lengths low .. high, the first of them ``high``."""
    lengths: list[int] = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [high, *lengths[1:]] if lengths else []


def _queries(num_tokens: int, sizes: Sizes, generator: torch.Generator, hard: str | None) -> torch.Tensor:
    shape = (num_tokens, sizes["num_heads"], sizes["head_dim"])
    return torch.randn(shape, generator=generator) * {"large_scores": _LARGE, "far_scales": _FAR}.get(hard or "", 1.0)


def _placed_keys(
    stage: Stage, lengths: list[int], sizes: Sizes, generator: torch.Generator, scales: torch.Tensor | None
) -> dict[str, Any]:
    """Pools, page table and table rows of sequences of these lengths; numbers of size 64 and their scales for pools of e4m3.

    The table's unused entries name a page that belongs to nobody: whatever is read through them is NaN.
    """
    page_size = sizes["page_size"]
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + _SPARE_PAGES, generator=generator).tolist()
    nobodys_page = order.pop()
    table = torch.full((len(lengths) + _SPARE_TABLE_ROWS, max(counts, default=0) + 1), nobodys_page)
    rows = torch.randperm(table.shape[0], generator=generator)[: len(lengths)]
    pools = torch.full((2, (sum(counts) + _SPARE_PAGES) * page_size, sizes["num_kv_heads"], sizes["head_dim"]), math.nan)
    for row, count, length in zip(rows.tolist(), counts, lengths, strict=True):
        pages = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
        table[row, :count] = pages
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        pools[:, slots] = torch.randn(2, length, *pools.shape[2:], generator=generator)
    k_pool, v_pool = stage.place_pools(*(pools if scales is None else (64 * pools).clamp(-448, 448)))
    by_head = (
        {} if scales is None else {"k_scale": stage.place("k_scale", scales[0]), "v_scale": stage.place("v_scale", scales[1])}
    )
    return {
        **{name: stage.place(name, values) for name, values in by_head.items()},
        "k_pool": k_pool,
        "v_pool": v_pool,
        "page_table": stage.place("page_table", table),
        "table_rows": stage.place("table_rows", rows),
    }


def _case(stage: Stage, contract: Contract, arguments: dict[str, Any], expected: torch.Tensor, hard: str | None) -> Case:
    q = arguments["q"]
    out = stage.unwritten("out", q.shape)
    k_pool, v_pool = arguments["k_pool"].float(), arguments["v_pool"].float()
    unit = torch.ones((), dtype=torch.float64, device=q.device)
    if "k_scale" in arguments:  # V's scales lie far apart: a result counts in units of its head's
        k_pool = k_pool.double() * arguments["k_scale"].double()[:, None]
        unit = arguments["v_scale"].double().repeat_interleave(q.shape[1] // k_pool.shape[1])[:, None]
    tolerance = _tolerance(q, k_pool, v_pool, arguments["sm_scale"])
    check = Check(f"{contract.op} out", lambda: out.double() / unit, expected / unit, *tolerance)
    return Case(hard or "random", {**arguments, "out": out}, [check, *stage.guards()])


def _tolerance(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, sm_scale: float) -> tuple[float, float]:
    """One rounding of the result, one of the weights, and the fp32 error of the scores.

    A kernel may round its softmax weights to the compute dtype before it multiplies them with V: half an eps of each, on a
    mean of |V|. An fp32 score errs by a few eps of its largest terms, and a weight by e to that.
    """
    fp32, dtype = torch.finfo(torch.float32).eps, q.dtype
    if not q.numel():
        return 0.0, 0.0
    q_norm, k_norm = (float(heads.double().norm(dim=-1).nan_to_num().max()) for heads in (q, k_pool))
    used = v_pool.double().abs()
    v_mean = float(used.nanmean().nan_to_num())
    scores = 4 * fp32 * (1.0 + sm_scale * q_norm * k_norm)
    weights = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    return torch.finfo(dtype).eps * (1 if weights else 8), (scores + weights) * v_mean


CASES: dict[str, CaseMaker] = {
    "flashattention2_nopad": partial(_prefill, FLASHATTENTION2_NOPAD),
    "flashattention2_nopad_fp8": partial(_prefill, FLASHATTENTION2_NOPAD_FP8),
    "flash_decoding": partial(_decode, FLASH_DECODING),
    "flash_decoding_fp8": partial(_decode, FLASH_DECODING_FP8),
}
