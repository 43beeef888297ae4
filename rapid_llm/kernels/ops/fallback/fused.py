"""Norms and activations that end in e4m3, and what ends in the pool, in plain torch."""

import torch
from torch.nn.functional import silu

from rapid_llm.kernels.ops.fallback.kvcache import update_kv_buffer
from rapid_llm.kernels.ops.fallback.norm import rms_norm
from rapid_llm.kernels.ops.fallback.quantization.fp8 import encode
from rapid_llm.kernels.ops.fallback.rotary import rope
from rapid_llm.kernels.ops.fused.inputs import check_add_rms_norm_fp8, check_swiglu_fp8
from rapid_llm.kernels.ops.fused.kv_inputs import check_rope_kv_write


def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, scales: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to ``residual`` in place, rounded to its dtype, and write rms_norm(residual) as e4m3 numbers into ``out``, returned.

    The norm is fp32 until it is rounded to e4m3, as quantize_fp8 does it.

    Args:
        x: [num_tokens, d], fp32 | bf16 | fp16; inner stride 1, row stride free.
        residual: like x; read and written; apart from x.
        weight: [d], same dtype; stride 1.
        out: [num_tokens, d], float8_e4m3fn; inner stride 1, row stride free.
        scales: fp32, any strides: [num_tokens] (or [num_tokens, 1]), one a token; or [num_tokens, ceil(d / 128)].
        eps: added to the mean square.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/fused.py::add_rms_norm_fp8. Origin: this repo.
    """
    group = check_add_rms_norm_fp8(x, residual, weight, out, scales)
    if x.shape[0]:
        wide = residual.add_(x).to(torch.float32)
        scale = wide.square().mean(dim=1, keepdim=True).add_(eps).rsqrt_()
        encode(wide * scale * weight, out, scales, group)
    return out


def swiglu_fp8(gate_up: torch.Tensor, *, out: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Write silu(gate) * up, computed in fp32, as quantize_fp8 does into ``out`` and return it; the scales into ``scales``.

    Args:
        gate_up: [num_tokens, 2 * d], fp32 | bf16 | fp16; gate first; inner stride 1, row stride free.
        out: [num_tokens, d], float8_e4m3fn, same device; inner stride 1, row stride free.
        scales: fp32, any strides: [num_tokens] (or [num_tokens, 1]), one a token; or [num_tokens, ceil(d / 128)].
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/fused.py::swiglu_fp8. Origin: this repo.
    """
    group = check_swiglu_fp8(gate_up, out, scales)
    if out.shape[0]:
        gate, up = gate_up.chunk(2, dim=1)
        encode(silu(gate.to(torch.float32)) * up, out, scales, group)
    return out


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
) -> None:
    """Rotate every head of q in place; write k, rotated, and v into row slot_mapping[t] of the pools; fp32 maths.

    Args:
        q: [num_tokens, num_heads, head_dim], fp32 | bf16 | fp16; inner stride 1, the others free.
        k, v: [num_tokens, num_kv_heads, head_dim], same dtype; inner stride 1, the others free; only read; apart from q.
        positions: [num_tokens], int32, each 0 <= id < max_positions; stride 1.
        cos_sin: [max_positions, head_dim], fp32; head_dim / 2 cosines, then as many sines; inner stride 1.
        slot_mapping: [num_tokens], int32; those inside the pool distinct; tokens of any other id are not written; stride 1.
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], same dtype; inner stride 1, the others free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/fused.py::rope_kv_write. Origin: this repo.
    """
    check_rope_kv_write("rope_kv_write", q, k, v, None, positions, cos_sin, slot_mapping, k_pool, v_pool)
    _write(q, k, v, None, positions, cos_sin, slot_mapping, k_pool, v_pool, 0.0)


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
) -> None:
    """As ``rope_kv_write``, every head of q and k brought to a root mean square of 1 and multiplied by its weight before.

    Args:
        q_weight, k_weight: [head_dim], dtype of q; stride 1.
        eps: added to the mean square of a head.

    Everything else as there.
    Twin: kernels/reference/fused.py::qk_norm_rope_kv_write. Origin: this repo.
    """
    weights = (q_weight, k_weight)
    check_rope_kv_write("qk_norm_rope_kv_write", q, k, v, weights, positions, cos_sin, slot_mapping, k_pool, v_pool)
    _write(q, k, v, weights, positions, cos_sin, slot_mapping, k_pool, v_pool, eps)


def _write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    eps: float,
) -> None:
    wide_q, wide_k = q.to(torch.float32, copy=True), k.to(torch.float32, copy=True)
    for heads, weight in zip((wide_q, wide_k), norms or (), strict=False):
        rms_norm(heads, weight.float(), out=heads, eps=eps)
    rope(wide_q, wide_k, positions, cos_sin)
    q.copy_(wide_q)
    update_kv_buffer(wide_k.to(k.dtype), v, slot_mapping, k_pool=k_pool, v_pool=v_pool)
