"""What the rows of update_kv_buffer_fp8 ask of their tensors before they launch. Apart from ``inputs.py``, by which others go."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_update_kv_buffer_fp8(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        not _rows_fit(k, v, slot_mapping, k_pool, v_pool, torch.float8_e4m3fn)
        or not (k_scale.shape == v_scale.shape == k.shape[1:2])
        or not (k_scale.dtype == v_scale.dtype == torch.float32)
        or not (k_scale.device == v_scale.device == k.device)
        or not (k_scale.stride(0) == v_scale.stride(0) == 1)
    ):
        arguments = {"k": k, "v": v, "slot_mapping": slot_mapping, "k_pool": k_pool, "v_pool": v_pool}
        raise KernelInputError(
            describe("update_kv_buffer_fp8", **arguments, k_scale=k_scale, v_scale=v_scale),
            wanted="k and v [num_tokens, num_kv_heads, head_dim] of one float dtype, slot_mapping [num_tokens] int32, "
            "pools [num_rows, num_kv_heads, head_dim] float8_e4m3fn, inner stride 1, scales [num_kv_heads] float32",
            change="pass head views of the projections, the K and V halves of one layer's pool, and its scales",
        )


def _rows_fit(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    pool_dtype: torch.dtype,
) -> bool:
    """Whether tokens, slots and pools agree in shape, dtype, device and inner stride."""
    return (
        k.dim() == k_pool.dim() == 3
        and k.shape == v.shape
        and k_pool.shape == v_pool.shape
        and k.shape[1:] == k_pool.shape[1:]
        and slot_mapping.shape == k.shape[:1]
        and k.dtype in _FLOATS
        and k.dtype == v.dtype
        and k_pool.dtype == v_pool.dtype == pool_dtype
        and slot_mapping.dtype == torch.int32
        and k.device == v.device == slot_mapping.device == k_pool.device == v_pool.device
        and k.stride(2) == v.stride(2) == k_pool.stride(2) == v_pool.stride(2) == slot_mapping.stride(0) == 1
    )
