"""Rotary position embedding of q and k in place, NeoX halves (Su et al. 2021, arXiv:2104.09864).

Memory-bound; one launch turns both, one program per (token, group of heads of q or of k): a group shares one load of the angles.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.rotary.inputs import check_rope
from rapid_llm.kernels.ops.tile_policy import resolve_tiles


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate the first rotary_dim entries of every head of q and k in place; fp32 maths, the other entries stay.

    Entry i of the first half and entry i of the second half form one pair, turned by the angle of frequency i.

    Args:
        q: [num_tokens, num_heads, head_dim], fp32 | bf16 | fp16; inner stride 1, the others free.
        k: [num_tokens, num_kv_heads, head_dim], same dtype; inner stride 1, the others free; apart from q.
        positions: [num_tokens], int32, each 0 <= id < max_positions; stride 1.
        cos_sin: [max_positions, rotary_dim], fp32; rotary_dim / 2 cosines, then as many sines; inner stride 1.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/rotary.py::rope. Origin: this repo.
    """
    check_rope(q, k, positions, cos_sin)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, rotary_dim = k.shape[1], cos_sin.shape[1]
    if num_tokens and rotary_dim and num_heads + num_kv_heads:
        sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        device = launch_device(q)
        tile = resolve_tiles("rope", device=device, dtype=q.dtype, rotary_dim=rotary_dim, **sizes)
        groups = triton.cdiv(num_heads, tile.BLOCK_M) + triton.cdiv(num_kv_heads, tile.BLOCK_M)
        _rope_kernel[(num_tokens * groups,)](
            q,
            k,
            positions,
            cos_sin,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos_sin.stride(0),
            num_heads,
            num_kv_heads,
            rotary_dim // 2,
            **tile.launch(),
            **dependent_launch(device),
        )


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    cos_sin_stride,
    num_heads,
    num_kv_heads,
    half,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    q_groups = tl.cdiv(num_heads, BLOCK_M)
    groups = q_groups + tl.cdiv(num_kv_heads, BLOCK_M)
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups

    pairs = tl.arange(0, BLOCK_N)
    position = tl.load(positions_ptr + token).to(tl.int64)
    angles = cos_sin_ptr + position * cos_sin_stride + pairs
    cos = tl.load(angles, mask=pairs < half, other=0.0)[None, :]
    sin = tl.load(angles + half, mask=pairs < half, other=0.0)[None, :]

    if group < q_groups:
        _turn(q_ptr + token * q_stride, q_head_stride, group * BLOCK_M, num_heads, cos, sin, pairs, half, BLOCK_M)
    else:
        first_head = (group - q_groups) * BLOCK_M
        _turn(k_ptr + token * k_stride, k_head_stride, first_head, num_kv_heads, cos, sin, pairs, half, BLOCK_M)


@triton.jit
def _turn(row_ptr, head_stride, first_head, num_heads, cos, sin, pairs, half, BLOCK_M: tl.constexpr):
    """Turn BLOCK_M heads of one token; both halves are read before either is written."""
    heads = (first_head + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]  # head * stride passes 2**31 where heads are outermost
    inside = (heads < num_heads) & (pairs[None, :] < half)
    first_ptrs = row_ptr + heads * head_stride + pairs[None, :]
    first = tl.load(first_ptrs, mask=inside, other=0.0).to(tl.float32)  # [M, N]
    second = tl.load(first_ptrs + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(first_ptrs, (first * cos - second * sin).to(row_ptr.dtype.element_ty), mask=inside)
    tl.store(first_ptrs + half, (second * cos + first * sin).to(row_ptr.dtype.element_ty), mask=inside)
