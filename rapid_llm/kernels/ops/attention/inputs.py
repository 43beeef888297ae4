"""What both attention ops ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe
from rapid_llm.kernels.device import DeviceInfo

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256  # an accumulator of 16 rows of more no longer fits the registers of a small program
_MAX_PAGE_SIZE = 256

Scales = tuple[torch.Tensor, torch.Tensor] | None
"""Of K and of V by KV head, where the pools are e4m3."""


def check_attention(
    op: str,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: Scales = None,
    *,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> None:
    """Raises: KernelInputError unless the tensors fit one another and the page size and scale are ones that the kernels serve."""
    fit = (
        pools_fit(q, k_pool, v_pool, out, scales)
        and indices_fit(page_table, table_rows, seq_lens, q)
        and 0 < q.shape[2] <= _MAX_HEAD_DIM
        and 0 < page_size <= _MAX_PAGE_SIZE
        and page_size & (page_size - 1) == 0
        and sm_scale > 0
    )
    if not fit:
        raise refusal(
            op, q=q, k_pool=k_pool, v_pool=v_pool, page_table=page_table, table_rows=table_rows, seq_lens=seq_lens, out=out,
            page_size=page_size, sm_scale=sm_scale, **named(scales),
        )  # fmt: skip


def check_prefill(
    op: str,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: Scales = None,
    *,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
    max_seqlen_q: int,
) -> None:
    """``check_attention``, and the bounds of the sequences' queries.

    Raises: KernelInputError as there, and unless the bounds are int32, dense and one more than sequences, and the length is 0 or
        more.
    """
    check_attention(
        op, q, k_pool, v_pool, page_table, table_rows, seq_lens, scales,
        out=out, page_size=page_size, sm_scale=sm_scale,
    )  # fmt: skip
    if (
        cu_seqlens_q.shape != (table_rows.shape[0] + 1,)
        or cu_seqlens_q.dtype != torch.int32
        or cu_seqlens_q.device != q.device
        or cu_seqlens_q.stride(0) != 1
        or max_seqlen_q < 0
    ):
        raise refusal(op, q=q, cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, max_seqlen_q=max_seqlen_q)


def refusal(op: str, **arguments: object) -> KernelInputError:
    """The error for arguments that do not fit one another."""
    return KernelInputError(
        describe(op, **arguments),
        wanted="q and out [tokens, num_heads, head_dim <= 256], pools [num_rows, num_kv_heads, head_dim] with num_kv_heads "
        "dividing num_heads, one float dtype (of _fp8 pools float8_e4m3fn, scales [num_kv_heads] float32); "
        "int32 page_table, table_rows, seq_lens and cu_seqlens_q; a page size that is a "
        "power of two up to 256; sm_scale above 0",
        change="pass head views with a dense last dimension, or name the torch row in RAPID_KERNELS",
    )


def pools_fit(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, out: torch.Tensor, scales: Scales = None) -> bool:
    """Whether q, pools, their scales and out agree in shape, dtype, device and inner stride."""
    return (
        q.dim() == k_pool.dim() == 3
        and q.shape == out.shape
        and k_pool.shape == v_pool.shape
        and q.shape[2] == k_pool.shape[2]
        and k_pool.shape[1] > 0
        and q.shape[1] % k_pool.shape[1] == 0
        and q.dtype in _FLOATS
        and q.dtype == out.dtype
        and k_pool.dtype == v_pool.dtype == (q.dtype if scales is None else torch.float8_e4m3fn)
        and q.device == k_pool.device == v_pool.device == out.device
        and q.stride(2) == k_pool.stride(2) == v_pool.stride(2) == out.stride(2) == 1
        and all(_is_by_head(scale, k_pool) for scale in scales or ())
    )


def _is_by_head(scale: torch.Tensor, pool: torch.Tensor) -> bool:
    return (
        scale.shape == pool.shape[1:2] and scale.dtype == torch.float32 and scale.device == pool.device and scale.stride(0) == 1
    )


def named(scales: Scales) -> dict[str, torch.Tensor]:
    """The scales as arguments of a call."""
    return {} if scales is None else {"k_scale": scales[0], "v_scale": scales[1]}


def in_memory(pool: torch.Tensor, device: DeviceInfo) -> torch.Tensor:
    """A pool as a kernel takes it: below sm89 none may take an e4m3 pointer, so that is bytes there."""
    return pool if pool.dtype != torch.float8_e4m3fn or device.native_fp8 else pool.view(torch.uint8)


def comes_in_pairs(pool: torch.Tensor) -> bool:
    """Whether a pool of bytes is one of pairs of bytes, too."""
    return pool.shape[2] % 2 == pool.stride(0) % 2 == pool.stride(1) % 2 == pool.data_ptr() % 2 == 0


def indices_fit(page_table: torch.Tensor, table_rows: torch.Tensor, seq_lens: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether table, row list and lengths are int32, dense inside, of one count and on q's device."""
    return (
        page_table.dim() == 2
        and table_rows.dim() == 1
        and table_rows.shape == seq_lens.shape
        and page_table.dtype == table_rows.dtype == seq_lens.dtype == torch.int32
        and page_table.device == table_rows.device == seq_lens.device == q.device
        and page_table.stride(1) == table_rows.stride(0) == seq_lens.stride(0) == 1
    )
