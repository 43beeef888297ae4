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
    weights = {} if norms is None else {"q_weight": norms[0], "k_weight": norms[1]}
    floats = (q, k, v, k_pool, v_pool, *weights.values())
    if (
        not (q.dim() == k.dim() == k_pool.dim() == 3 and cos_sin.dim() == 2)
        or k.shape != v.shape
        or k_pool.shape != v_pool.shape
        or not (q.shape[:1] == k.shape[:1] == positions.shape == slot_mapping.shape)
        or not (q.shape[2:] == k.shape[2:] == cos_sin.shape[1:])
        or k.shape[1:] != k_pool.shape[1:]
        or any(weight.shape != q.shape[2:] for weight in weights.values())
        or q.shape[2] % 2
        or q.dtype not in _FLOATS
        or any(tensor.dtype != q.dtype for tensor in floats)
        or not (positions.dtype == slot_mapping.dtype == torch.int32)
        or cos_sin.dtype != torch.float32
        or any(tensor.device != q.device or tensor.stride(-1) != 1 for tensor in (*floats, positions, cos_sin, slot_mapping))
    ):
        places = {"positions": positions, "cos_sin": cos_sin, "slot_mapping": slot_mapping}
        raise KernelInputError(
            describe(op, q=q, k=k, v=v, **weights, **places, k_pool=k_pool, v_pool=v_pool),
            wanted="q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim], "
            + ("" if norms is None else "q_weight and k_weight [head_dim], ")
            + "pools [num_rows, num_kv_heads, head_dim], one float dtype; positions and slot_mapping [num_tokens] int32, cos_sin "
            "[max_positions, even head_dim] fp32; inner stride 1",
            change="pass head views of the projection, the table of a model that rotates whole heads and one layer's pool",
        )
