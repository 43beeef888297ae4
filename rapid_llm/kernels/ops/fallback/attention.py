"""Attention in plain torch, read through the page table: packed ragged prefill, and decode of one query a sequence."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rapid_llm.errors import KernelInputError, describe
from rapid_llm.kernels.ops.attention.inputs import Scales, indices_fit, named, pools_fit

_GATHER_ELEMENTS = 1 << 24  # of K, and of V, that one decode batch gathers: 64 MiB each in fp32
_MASK_ELEMENTS = 1 << 22  # of the causal mask of one query chunk


def flashattention2_nopad(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
    max_seqlen_q: int,
) -> torch.Tensor:
    """Write causal attention of packed ragged prompts, or chunks of them, into ``out`` and return it; fp32 maths.

    Rows cu_seqlens_q[b]:cu_seqlens_q[b + 1] of q are the last tokens of sequence b's seq_lens[b] keys; those before are its
    cached prefix. The key at position p lies in pool row page_table[table_rows[b], p // page_size] * page_size + p % page_size.

    Args:
        q: [num_tokens, num_heads, head_dim], fp32 | bf16 | fp16; inner stride 1, the others free.
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], same dtype, num_kv_heads divides num_heads; inner stride 1.
        page_table: [num_table_rows, num_columns], int32; inner stride 1. Columns past a sequence's end may hold anything.
        table_rows: [num_seqs], int32; stride 1.
        cu_seqlens_q: [num_seqs + 1], int32, never falling; rows of q before its first entry and past its last are nobody's.
        seq_lens: [num_seqs], int32, keys of each sequence, its query tokens included; stride 1.
        out: like q; apart from it. Nobody's rows keep what they hold.
        page_size: rows of a page.
        sm_scale: factor on q . k.
        max_seqlen_q: at least the longest run of query tokens.
    Raises: KernelInputError on any other shape, dtype, stride, device or length; nothing is written then.
    Twin: kernels/reference/attention.py::flashattention2_nopad. Origin: this repo; packing as in FlashAttention-2
        (Dao 2023, arXiv:2307.08691).
    """
    sequences = (page_table, table_rows, cu_seqlens_q, seq_lens)
    return _prefill(q, k_pool, v_pool, *sequences, None, out, page_size, sm_scale, max_seqlen_q)


def flashattention2_nopad_fp8(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
    max_seqlen_q: int,
) -> torch.Tensor:
    """``flashattention2_nopad`` over pools of e4m3, whose numbers times their head's scale are K and V.

    Args:
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], float8_e4m3fn; inner stride 1.
        k_scale, v_scale: [num_kv_heads], fp32, above 0, which is not looked at; stride 1.

    Everything else as there.
    Twin: kernels/reference/attention.py::flashattention2_nopad_fp8.
    """
    sequences = (page_table, table_rows, cu_seqlens_q, seq_lens)
    return _prefill(q, k_pool, v_pool, *sequences, (k_scale, v_scale), out, page_size, sm_scale, max_seqlen_q)


def flash_decoding(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> torch.Tensor:
    """Write the attention of one query per sequence over its seq_lens[b] keys into ``out`` and return it; fp32 maths.

    Where seq_lens[b] is 0 the row is padding: zeros are written and neither table nor pool is read.

    Args:
        q: [num_seqs, num_heads, head_dim], fp32 | bf16 | fp16; inner stride 1, the others free.
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], same dtype, num_kv_heads divides num_heads; inner stride 1.
        page_table: [num_table_rows, num_columns], int32; inner stride 1. Columns past a sequence's end may hold anything.
        table_rows: [num_seqs], int32; stride 1.
        seq_lens: [num_seqs], int32; stride 1.
        out: like q; apart from it.
        page_size: rows of a page.
        sm_scale: factor on q . k.
    Raises: KernelInputError on any other shape, dtype, stride, device or length; nothing is written then.
    Twin: kernels/reference/attention.py::flash_decoding. Origin: this repo.
    """
    return _decode(q, k_pool, v_pool, page_table, table_rows, seq_lens, None, out, page_size, sm_scale)


def flash_decoding_fp8(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> torch.Tensor:
    """``flash_decoding`` over pools of e4m3, whose numbers times their head's scale are K and V.

    Args:
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], float8_e4m3fn; inner stride 1.
        k_scale, v_scale: [num_kv_heads], fp32, above 0, which is not looked at; stride 1.

    Everything else as there.
    Twin: kernels/reference/attention.py::flash_decoding_fp8.
    """
    return _decode(q, k_pool, v_pool, page_table, table_rows, seq_lens, (k_scale, v_scale), out, page_size, sm_scale)


def prepare_flash_decoding(
    shared: dict[Any, Any],
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> tuple[Callable[[], object], ...]:
    """The call that repeats ``flash_decoding`` on the same tensors, whose lengths and rows may have changed.

    None of its own for more than one sequence, below fp32, or for padding.
    """
    if q.shape[0] != 1 or q.dtype != torch.float32 or not seq_lens.item():
        return ()
    grouped = (k_pool.shape[1], -1, q.shape[2])
    key = ("flash_decoding", id(page_table), id(table_rows), id(seq_lens), page_size)
    calls: list[Callable[[], object]] = []
    if key not in shared:  # the first layer's call finds the pool rows for all
        shared[key] = _Span(page_table, table_rows, seq_lens, page_size)
        calls.append(shared[key].refresh)
    keys, values = k_pool.permute(1, 2, 0), v_pool.transpose(0, 1)
    calls.append(partial(_decode_span, q[0].view(grouped), keys, values, shared[key], out[0].view(grouped), sm_scale))
    return tuple(calls)


class _Span:
    """Where the keys of the one sequence of a recorded step lie, brought up to date once a step.

    Attributes:
        first, length: a run of pool rows, when its pages lie side by side.
        slots: its pool rows one by one, when they do not.
    """

    def __init__(self, page_table: torch.Tensor, table_rows: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> None:
        self._tensors, self._page_size = (page_table, table_rows, seq_lens), page_size
        self.first = self.length = 0
        self.slots: torch.Tensor | None = None

    def refresh(self) -> None:
        """Read table and length again."""
        page_table, table_rows, seq_lens = self._tensors
        self.length = int(seq_lens.item())
        self.first, self.slots = _find_rows(page_table.select(0, int(table_rows.item())), self.length, self._page_size)


def _decode_span(
    heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: _Span, out: torch.Tensor, sm_scale: float
) -> None:
    """As _decode_one, over the span's part of a whole pool: keys [Hkv, D, num_rows], values [Hkv, num_rows, D]."""
    if span.slots is None:
        keys, values = keys.narrow(2, span.first, span.length), values.narrow(1, span.first, span.length)
    else:
        keys, values = keys.index_select(2, span.slots), values.index_select(1, span.slots)
    _decode_one(heads, keys, values, out, sm_scale)


def _prefill(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: Scales,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
    max_seqlen_q: int,
) -> torch.Tensor:
    op = "flashattention2_nopad" if scales is None else "flashattention2_nopad_fp8"
    tensors = {
        "q": q, "k_pool": k_pool, "v_pool": v_pool, "page_table": page_table, "table_rows": table_rows,
        "cu_seqlens_q": cu_seqlens_q, "seq_lens": seq_lens, "out": out, **named(scales),
    }  # fmt: skip
    num_seqs = table_rows.shape[0]
    if not pools_fit(q, k_pool, v_pool, out, scales) or not indices_fit(page_table, table_rows, seq_lens, q) or page_size < 1:
        raise _refusal(op, **tensors, page_size=page_size)
    if cu_seqlens_q.shape != (num_seqs + 1,) or cu_seqlens_q.dtype != torch.int32 or cu_seqlens_q.device != q.device:
        raise _refusal(op, **tensors, page_size=page_size)
    if not num_seqs or not q.shape[0]:
        return out

    starts, lengths, rows = cu_seqlens_q.tolist(), seq_lens.tolist(), table_rows.tolist()
    runs = [end - start for start, end in pairwise(starts)]
    if starts[0] < 0 or starts[-1] > q.shape[0] or min(runs) < 0 or max(runs) > max_seqlen_q:
        raise _refusal(op, cu_seqlens_q=starts, num_tokens=q.shape[0], max_seqlen_q=max_seqlen_q)
    capacity = page_table.shape[1] * page_size
    if any(run and not run <= length <= capacity for run, length in zip(runs, lengths, strict=True)):
        raise _refusal(op, query_tokens=runs, seq_lens=lengths, capacity=capacity)

    for start, run, length, row in zip(starts, runs, lengths, rows, strict=False):
        if run:
            keys, values = _rows_of(k_pool, v_pool, page_table[row], length, page_size, scales)
            _prefill_sequence(q[start : start + run], keys, values, out[start : start + run], sm_scale)
    return out


def _decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: Scales,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> torch.Tensor:
    op = "flash_decoding" if scales is None else "flash_decoding_fp8"
    if not pools_fit(q, k_pool, v_pool, out, scales) or not indices_fit(page_table, table_rows, seq_lens, q) or page_size < 1:
        raise _refusal(
            op, q=q, k_pool=k_pool, v_pool=v_pool, page_table=page_table, table_rows=table_rows,
            seq_lens=seq_lens, out=out, page_size=page_size, **named(scales),
        )  # fmt: skip
    if q.shape[0] != table_rows.shape[0]:
        raise _refusal(op, q=q, table_rows=table_rows)
    lengths = seq_lens.tolist()
    capacity = page_table.shape[1] * page_size
    if any(not 0 <= length <= capacity for length in lengths):
        raise _refusal(op, seq_lens=lengths, capacity=capacity)

    if len(lengths) == 1 and lengths[0]:
        keys, values = _rows_of(k_pool, v_pool, page_table[int(table_rows)], lengths[0], page_size, scales)
        if q.dtype != torch.float32:
            out.copy_(_attend_one_query(q, keys[None], values[None], sm_scale))
        else:
            grouped = (keys.shape[1], -1, q.shape[2])  # the query heads of a KV head ride together
            _decode_one(q[0].view(grouped), keys.permute(1, 2, 0), values.transpose(0, 1), out[0].view(grouped), sm_scale)
        return out
    if not all(lengths):
        out.masked_fill_((seq_lens == 0)[:, None, None], 0.0)
    for group in _groups(lengths, k_pool.shape[1] * k_pool.shape[2]):
        members = torch.tensor(group, device=q.device)
        attended = _decode_group(
            q.index_select(0, members), k_pool, v_pool,
            page_table.index_select(0, table_rows.index_select(0, members)), seq_lens.index_select(0, members),
            scales, longest=lengths[group[-1]], page_size=page_size, sm_scale=sm_scale,
        )  # fmt: skip
        out.index_copy_(0, members, attended)
    return out


def _refusal(op: str, **arguments: object) -> KernelInputError:
    """The error for arguments that do not fit one another."""
    return KernelInputError(
        describe(op, **arguments),
        wanted="q and out [tokens, num_heads, head_dim], pools [num_rows, num_kv_heads, head_dim] with num_kv_heads dividing "
        "num_heads, one float dtype (of _fp8 pools float8_e4m3fn, scales [num_kv_heads] float32); "
        "int32 page_table, table_rows, lengths and offsets; lengths within the table's columns",
        change="pass head views with a dense last dimension, and lengths that the page table covers",
    )


def _rows_of(
    k_pool: torch.Tensor, v_pool: torch.Tensor, table_row: torch.Tensor, length: int, page_size: int, scales: Scales
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the first ``length`` positions of one sequence, [length, Hkv, D] each."""
    first, slots = _find_rows(table_row, length, page_size)
    if slots is None:  # views of a run of rows, as an undisturbed sequence has them
        return _numbers(k_pool.narrow(0, first, length), v_pool.narrow(0, first, length), scales)
    return _gathered(k_pool, v_pool, slots, scales)


def _gathered(
    k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor, scales: Scales
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of scattered rows, [len(slots), Hkv, D] each."""
    if scales is None:
        return k_pool.index_select(0, slots), v_pool.index_select(0, slots)
    # What picks rows knows bytes and no e4m3.
    keys, values = (pool.view(torch.uint8).index_select(0, slots).view(torch.float8_e4m3fn) for pool in (k_pool, v_pool))
    return _numbers(keys, values, scales)


def _numbers(keys: torch.Tensor, values: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [L, Hkv, D] of K and of V as they are; those of e4m3 as fp32 numbers times their head's scale."""
    if scales is None:
        return keys, values
    # By a table: torch turns e4m3 into floats one by one, which takes a CPU five times as long.
    table = torch.arange(256, dtype=torch.uint8, device=keys.device).view(torch.float8_e4m3fn).float()
    k, v = (table.index_select(0, rows.view(torch.uint8).int().flatten()).view(rows.shape) for rows in (keys, values))
    return k.mul_(scales[0][:, None]), v.mul_(scales[1][:, None])


def _find_rows(table_row: torch.Tensor, length: int, page_size: int) -> tuple[int, torch.Tensor | None]:
    """The pool rows of the first ``length`` positions: the first of a run, or, where pages lie apart, all of them, int64."""
    pages = table_row.narrow(0, 0, -(-length // page_size))
    listed = pages.tolist()
    first = listed[0]
    if listed == list(range(first, first + len(listed))):
        return first * page_size, None
    inside = torch.arange(page_size, device=pages.device)
    return 0, (pages.long()[:, None] * page_size + inside).view(-1)[:length]  # int64 first: rows can pass 2**31


def _decode_one(heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, sm_scale: float) -> None:
    """Attention of one query in fp32, heads and out [Hkv, G, D], over keys [Hkv, D, L] and values [Hkv, L, D]."""
    scores = heads.new_empty(heads.shape[0], heads.shape[1], keys.shape[2])
    torch.baddbmm(scores, heads, keys, beta=0, alpha=sm_scale, out=scores)
    torch.softmax(scores, -1, out=scores)
    torch.bmm(scores, values, out=out)


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any) -> torch.Tensor:
    """torch's own attention; on a GPU by plain products, since its fused kernels fault on addresses that views may have."""
    if not q.is_cuda:
        return scaled_dot_product_attention(q, keys, values, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, keys, values, **options)


def _prefill_sequence(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, sm_scale: float) -> None:
    """Causal attention of one sequence: q and out [Tq, Hq, D], keys and values [Tk, Hkv, D], the queries last.

    KV heads are the batch and the query heads that share one are the heads: K and V are then read through a stride of 0
    and never repeated.
    """
    num_queries, num_keys, num_kv_heads = q.shape[0], keys.shape[0], keys.shape[1]
    heads = q.view(num_queries, num_kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3).float()  # [Hkv, G, Tq, D]
    out_heads = out.view(num_queries, num_kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
    keys = keys.transpose(0, 1)[:, None].float().expand(-1, heads.shape[1], -1, -1)
    values = values.transpose(0, 1)[:, None].float().expand(-1, heads.shape[1], -1, -1)
    if num_queries == num_keys:
        out_heads.copy_(_attend(heads, keys, values, is_causal=True, scale=sm_scale))
        return
    prefix = num_keys - num_queries
    step = max(1, _MASK_ELEMENTS // num_keys)
    for first in range(0, num_queries, step):
        last = min(first + step, num_queries)
        seen = prefix + last
        mask = q.new_full((last - first, seen), float("-inf"), dtype=torch.float32).triu_(prefix + first + 1)
        attended = _attend(heads[:, :, first:last], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=sm_scale)
        out_heads[:, :, first:last].copy_(attended)


def _attend_one_query(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sm_scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of q [B, Hq, D] over keys and values [B, L, Hkv, D]; ``mask`` is added to the scores. [B, Hq, D] in q's dtype.

    The query heads that share a KV head stand where query tokens usually do, so K and V are not repeated.
    """
    heads = q.view(q.shape[0], keys.shape[2], -1, q.shape[2]).float()  # [B, Hkv, G, D]
    attended = _attend(heads, keys.transpose(1, 2).float(), values.transpose(1, 2).float(), attn_mask=mask, scale=sm_scale)
    return attended.flatten(1, 2).to(q.dtype)


def _decode_group(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: Scales,
    *,
    longest: int,
    page_size: int,
    sm_scale: float,
) -> torch.Tensor:
    """Attention of sequences of like length, padded to the longest: q [B, Hq, D], table [B, num_columns], every length > 0."""
    positions = torch.arange(longest, device=q.device)
    pages = table.index_select(1, positions // page_size).long()
    slots = pages * page_size + positions % page_size  # [B, L]
    beyond = positions >= seq_lens[:, None]
    # Past its end a sequence reads its own first key: an unused row may hold NaN, and 0 * NaN is NaN.
    slots = torch.where(beyond, slots[:, :1], slots).view(-1)
    shape = (q.shape[0], longest, *k_pool.shape[1:])
    mask = torch.zeros(beyond.shape, device=q.device).masked_fill_(beyond, float("-inf"))
    group = q.shape[1] // k_pool.shape[1]
    keys, values = _gathered(k_pool, v_pool, slots, scales)
    return _attend_one_query(
        q,
        keys.view(shape),
        values.view(shape),
        sm_scale,
        mask[:, None, None, :].expand(-1, 1, group, -1),
    )


def _groups(lengths: list[int], row_elements: int) -> Iterator[list[int]]:
    """Sequences that have keys, shortest first, cut where the padded gather of a group would pass its bound."""
    group: list[int] = []
    for sequence in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[sequence] * row_elements > _GATHER_ELEMENTS:
            yield group
            group = []
        if lengths[sequence]:
            group.append(sequence)
    if group:
        yield group
