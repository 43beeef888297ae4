"""KV write into a pool of e4m3: as ``update_kv_buffer.py``, with a division and a rounding on the way. Memory-bound."""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.kvcache.fp8_inputs import check_update_kv_buffer_fp8
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.primitives.e4m3_pool import e4m3_bytes

_TILE_ELEMENTS = 1024  # of K, and as many of V, in flight in a warp


def update_kv_buffer_fp8(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write token t's K and V, divided by the scales and rounded to the nearest e4m3, into row slot_mapping[t] of the pools.

    Ids below 0 or past the last row are skipped. Finite values past +-448 scales become +-448. NaN stays NaN, and so does an
    infinity, which e4m3 has not. The bytes are the same on every device.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], fp32 | bf16 | fp16; inner stride 1, the others free.
        slot_mapping: [num_tokens], int32; those inside the pool distinct, in any order; stride 1.
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], float8_e4m3fn; inner stride 1, the others free. Only the named rows
            are written.
        k_scale, v_scale: [num_kv_heads], fp32, above 0, which is not looked at; stride 1.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/kvcache.py::update_kv_buffer_fp8. Origin: this repo; the number format is that of Micikevicius et al.
        2022, https://arxiv.org/abs/2209.05433.
    """
    check_update_kv_buffer_fp8(k, v, slot_mapping, k_pool, v_pool, k_scale, v_scale)
    num_tokens, num_kv_heads, head_dim = k.shape
    if not k.numel():
        return
    width = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(num_kv_heads), max(_TILE_ELEMENTS // width, 1))
    _update_kv_buffer_fp8_kernel[(num_tokens,)](
        k,
        v,
        k_pool.view(torch.uint8),
        v_pool.view(torch.uint8),
        slot_mapping,
        k_scale,
        v_scale,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        k_pool.shape[0],
        num_kv_heads,
        head_dim,
        BLOCK_M=heads,
        BLOCK_N=width,
        num_warps=1,
        num_stages=1,
        **dependent_launch(launch_device(k)),
    )


@triton.jit
def _update_kv_buffer_fp8_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slot_mapping_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    k_pool_stride,
    k_pool_head_stride,
    v_pool_stride,
    v_pool_head_stride,
    num_rows,
    num_kv_heads,
    head_dim,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if (slot >= 0) & (slot < num_rows):  # -1 is padding
        row = slot.to(tl.int64)  # row * stride passes 2**31 in pools that fit on a card
        cols = tl.arange(0, BLOCK_N)[None, :]
        for start in range(0, num_kv_heads, BLOCK_M):
            heads = (start + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
            inside = (heads < num_kv_heads) & (cols < head_dim)  # [M, N]

            key = tl.load(k_ptr + token * k_stride + heads * k_head_stride + cols, mask=inside, other=0.0)
            value = tl.load(v_ptr + token * v_stride + heads * v_head_stride + cols, mask=inside, other=0.0)
            key = e4m3_bytes(key, tl.load(k_scale_ptr + heads, mask=heads < num_kv_heads, other=1.0))
            value = e4m3_bytes(value, tl.load(v_scale_ptr + heads, mask=heads < num_kv_heads, other=1.0))

            tl.store(k_pool_ptr + row * k_pool_stride + heads * k_pool_head_stride + cols, key, mask=inside)
            tl.store(v_pool_ptr + row * v_pool_stride + heads * v_pool_head_stride + cols, value, mask=inside)
