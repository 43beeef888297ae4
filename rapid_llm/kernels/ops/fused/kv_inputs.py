"""What the rows of rope_kv_write and qk_norm_rope_kv_write ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_rope_kv_write(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if not _fit(q, k, v, norms, positions, cos_sin, slot_mapping, k_pool, v_pool):
        weights = {} if norms is None else {"q_weight": norms[0], "k_weight": norms[1]}
        tensors = {"q": q, "k": k, "v": v, **weights, "positions": positions, "cos_sin": cos_sin, "slot_mapping": slot_mapping}
        raise KernelInputError(
            describe(op, **tensors, k_pool=k_pool, v_pool=v_pool),
            wanted="q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim], "
            + ("" if norms is None else "q_weight and k_weight [head_dim], ")
            + "pools [num_rows, num_kv_heads, head_dim], one float dtype; positions and slot_mapping [num_tokens] int32, cos_sin "
            "[max_positions, even head_dim] fp32; inner stride 1",
            change="pass head views of the projection, the table of a model that rotates whole heads and one layer's pool",
        )


def _fit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> bool:
    if not (q.dim() == k.dim() == k_pool.dim() == 3 and cos_sin.dim() == 2):
        return False
    tokens, _, head_dim = q.shape
    weights = norms or ()
    floats = (q, k, v, k_pool, v_pool, *weights)
    tensors = (*floats, positions, cos_sin, slot_mapping)
    return (
        k.shape == v.shape
        and k_pool.shape == v_pool.shape
        and k.shape[0] == tokens
        and k.shape[2] == cos_sin.shape[1] == head_dim
        and k.shape[1:] == k_pool.shape[1:]
        and positions.shape == slot_mapping.shape == (tokens,)
        and all(weight.shape == (head_dim,) for weight in weights)
        and head_dim % 2 == 0
        and q.dtype in _FLOATS
        and all(tensor.dtype == q.dtype for tensor in floats)
        and positions.dtype == slot_mapping.dtype == torch.int32
        and cos_sin.dtype == torch.float32
        and all(tensor.device == q.device and tensor.stride(-1) == 1 for tensor in tensors)
    )
