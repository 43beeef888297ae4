"""Fused ops in float64: what ends in e4m3 up to the rounding to e4m3, what ends in the pool up to that to its dtype."""

import torch

from rapid_llm.kernels.reference.activation import swiglu
from rapid_llm.kernels.reference.kvcache import update_kv_buffer
from rapid_llm.kernels.reference.norm import add_rms_norm, rms_norm
from rapid_llm.kernels.reference.rotary import rope


def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new residual as add_rms_norm has it, its norm in units of the scales, the scales: [T, d] twice, [T, d / group]."""
    new_residual, norm = add_rms_norm(x, residual, weight, eps=eps)
    return new_residual, *scaled(norm, group)


def swiglu_fp8(gate_up: torch.Tensor, *, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of a fused row [T, 2 * d] in units of the scales, and those: [T, d], [T, ceil(d / group)]."""
    return scaled(swiglu(gate_up), group)


def scaled(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``values`` float64 [T, d], NaN where they are not finite, over their scales: largest magnitude of each group / 448."""
    tokens, d = values.shape
    groups = -(-d // group)
    padded = torch.nn.functional.pad(values, (0, groups * group - d)).view(tokens, groups, group)
    finite = torch.where(padded.isfinite(), padded, torch.nan)
    scales = (finite.nan_to_num(0.0).abs().amax(dim=2) / 448.0).clamp(min=torch.finfo(torch.float32).tiny)
    return (finite / scales.unsqueeze(2)).flatten(1)[:, :d], scales


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q turned [T, H, D] and the pools after the write [num_rows, Hkv, D] each, float64; ids outside the pool are skipped."""
    turned_q, turned_k = rope(q, k, positions, cos_sin)
    return turned_q, *update_kv_buffer(turned_k, v, slot_mapping, k_pool=k_pool, v_pool=v_pool)


def qk_norm_rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with every head of q and k normed first."""
    q, k = rms_norm(q, q_weight, eps=eps), rms_norm(k, k_weight, eps=eps)
    return rope_kv_write(q, k, v, positions, cos_sin, slot_mapping, k_pool=k_pool, v_pool=v_pool)
