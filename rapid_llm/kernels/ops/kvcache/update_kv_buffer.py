"""KV write: each token's K and V into its row of the pool. Memory-bound, a scatter of rows; one program per token.

The smallest complete kernel of the package. A program is one warp: its row is a few KiB, and a step has at most some thousands.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.kvcache.inputs import check_update_kv_buffer
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs

_TILE_ELEMENTS = 1024  # of K, and as many of V, in flight in a warp


def update_kv_buffer(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> None:
    """Copy token t's K and V into row slot_mapping[t] of the pools; ids below 0 or past the last row are skipped.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], fp32 | bf16 | fp16; inner stride 1, the others free.
        slot_mapping: [num_tokens], int32; those inside the pool distinct, in any order; stride 1.
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], same dtype; usually the two head halves of one
            [num_rows, 2 * num_kv_heads, head_dim] buffer; inner stride 1, the others free. Only the named rows are written.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/kvcache.py::update_kv_buffer. Origin: this repo.
    """
    check_update_kv_buffer(k, v, slot_mapping, k_pool, v_pool)
    num_tokens, num_kv_heads, head_dim = k.shape
    if not k.numel():
        return
    width = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(num_kv_heads), max(_TILE_ELEMENTS // width, 1))
    _update_kv_buffer_kernel[(num_tokens,)](
        k,
        v,
        k_pool,
        v_pool,
        slot_mapping,
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
def _update_kv_buffer_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slot_mapping_ptr,
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

            tl.store(k_pool_ptr + row * k_pool_stride + heads * k_pool_head_stride + cols, key, mask=inside)
            tl.store(v_pool_ptr + row * v_pool_stride + heads * v_pool_head_stride + cols, value, mask=inside)
