"""Rows whose answer for a token has the same bits alone and in any batch: what ``EngineConfig.deterministic`` asks of a layer.

Sums of floats depend on their order, and the order on how many rows are computed at a time (He 2025,
https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/). On a GPU a native row sums in the order of its tile,
so every call takes the tile of one fixed batch. A CPU's libraries promise no order at all, and the tails of vectorised functions
round otherwise than their middles: there every token, and in attention every query, is a call of its own, on copies that are
always laid out alike.
"""

from collections.abc import Callable
from inspect import signature
from itertools import pairwise
from typing import Any

import torch

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.ops.interfaces import Contract, KernelSpec
from rapid_llm.kernels.ops.tile_policy import tiles_of_one_batch

Function = Callable[..., Any]

_ATTENTION = ("flashattention2_nopad", "flashattention2_nopad_fp8")
# They move numbers, or make each of its own by operations that are rounded exactly: nothing is summed.
_EXACT = frozenset(
    (
        "vocab_embedding",
        "update_kv_buffer",
        "update_kv_buffer_fp8",
        "update_kv_index",
        "gather_columns",
        "adjust_logits",
        "mask_logits",
    )
)
# Ops whose native rows sum in the order of their tile alone. Those of quantised weights and of experts are not looked into yet.
_KV_WRITES = ("rope_kv_write", "qk_norm_rope_kv_write")
_ORDERED_BY_TILE = frozenset(
    ("dense_gemm", *_ATTENTION, "rms_norm", "add_rms_norm", "swiglu", "rope", *_KV_WRITES, "sample", "top_logprobs")
)


def batch_invariant(row: KernelSpec, function: Function, *, on_cpu: bool) -> Function:
    """A function called like the row's own.

    Raises: ConfigError where that row, on a GPU, is not known to give the same bits in any batch.
    """
    if row.op in _EXACT:
        return function
    if on_cpu:
        return _query_by_query(function) if row.op in _ATTENTION else _RowByRow(catalog().contract(row.op), function)
    if row.op not in _ORDERED_BY_TILE or row.fallback:
        raise ConfigError(
            f"deterministic cannot be kept by {row.op} on a GPU",
            got=row.name,
            wanted="native rows of " + ", ".join(sorted(_ORDERED_BY_TILE)),
            change="leave deterministic out, use a dense model whose weights are not quantised, or a CPU",
        )
    return _with_one_tile(function)


def _with_one_tile(function: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        with tiles_of_one_batch():
            return function(*args, **kwargs)

    return call


class _RowByRow:
    """Calls a function once for each row of the tensors that have one a token or sequence, as the contract says."""

    def __init__(self, contract: Contract, function: Function) -> None:
        by_row = [tensor for tensor in contract.tensors if contract.free in tensor.dims]
        self._function, self._names = function, tuple(signature(function).parameters)
        self._by_row = {tensor.name for tensor in by_row}
        self._written = {tensor.name for tensor in by_row if tensor.written}

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        tensors = {name: value for name, value in arguments.items() if name in self._by_row and value is not None}
        for row in range(len(next(iter(tensors.values())))):
            # By identity: where an op may write over what it reads, both are one tensor here too.
            alone = {id(tensor): _copy_of(tensor, row) for tensor in tensors.values()}
            self._function(**arguments | {name: alone[id(tensor)] for name, tensor in tensors.items()})
            for name in self._written & tensors.keys():
                tensors[name][row : row + 1].copy_(alone[id(tensors[name])])


def _copy_of(tensor: torch.Tensor, row: int) -> torch.Tensor:
    """One row, dense and on a boundary that libraries like, wherever it lay."""
    return tensor[row : row + 1].clone(memory_format=torch.contiguous_format)


def _query_by_query(function: Function) -> Function:
    """Attention of one query at a time over a copy of its keys in order, wherever their pages lie."""

    def attend(
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        page_table: torch.Tensor,
        *sequences: torch.Tensor,
        out: torch.Tensor,
        page_size: int,
        max_seqlen_q: int,
        **rest: Any,
    ) -> None:
        rows, bounds, lengths = (values.tolist() for values in sequences)  # table_rows, cu_seqlens_q, seq_lens
        for (start, stop), length, row in zip(pairwise(bounds), lengths, rows, strict=True):
            if start == stop:  # padding
                continue
            pages = -(-length // page_size)
            inside = torch.arange(page_size, device=q.device)
            slots = (page_table[row, :pages].long()[:, None] * page_size + inside).view(-1)[:length]
            keys, values = k_pool.index_select(0, slots), v_pool.index_select(0, slots)
            table = torch.arange(pages, dtype=torch.int32, device=q.device)[None]
            first, one_query = table.new_zeros(1), table.new_tensor([0, 1])
            for token in range(start, stop):
                query, seen = _copy_of(q, token), table.new_tensor([length - (stop - 1 - token)])
                result = torch.empty_like(query)
                function(
                    query, keys, values, table, first, one_query, seen,
                    out=result, page_size=page_size, max_seqlen_q=1, **rest,
                )  # fmt: skip
                out[token : token + 1].copy_(result)

    return attend
