"""All that stands between the projection and attention, in one launch: norms of q and k, rotation, KV write.

Memory-bound, and at few tokens the launches saved are all that counts: three of them without norms, five with norms become one.
Nothing is rounded in between. One program per (token, group of heads of q, or of k and v); a program holds its heads in
registers as two halves, whose entries are the pairs that are turned. Keys go to the pool alone, since nobody reads them
elsewhere.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.fused.kv_inputs import check_rope_kv_write
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, let_next_begin, wait_for_inputs
from rapid_llm.kernels.ops.tile_policy import resolve_tiles


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

    Entry i of a head's first half and entry i of its second form one pair, turned by the angle of frequency i. Tokens whose slot
    is below 0 or past the last row are not written.

    Args:
        q: [num_tokens, num_heads, head_dim], fp32 | bf16 | fp16; inner stride 1, the others free.
        k, v: [num_tokens, num_kv_heads, head_dim], same dtype; inner stride 1, the others free; only read; apart from q.
        positions: [num_tokens], int32, each 0 <= id < max_positions; stride 1.
        cos_sin: [max_positions, head_dim], fp32; head_dim / 2 cosines, then as many sines; inner stride 1.
        slot_mapping: [num_tokens], int32; those inside the pool distinct, in any order; stride 1.
        k_pool, v_pool: [num_rows, num_kv_heads, head_dim], same dtype; inner stride 1, the others free; only the named rows are
            written.
    From sm90 on positions, cos_sin, slot_mapping and weights may be read before the kernel launched last has ended, so they are
    not what that one writes.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/fused.py::rope_kv_write. Origin: this repo.
    """
    _launch("rope_kv_write", q, k, v, None, positions, cos_sin, slot_mapping, k_pool, v_pool, 0.0)


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
    _launch("qk_norm_rope_kv_write", q, k, v, weights, positions, cos_sin, slot_mapping, k_pool, v_pool, eps)


def _launch(
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
    eps: float,
) -> None:
    check_rope_kv_write(op, q, k, v, norms, positions, cos_sin, slot_mapping, k_pool, v_pool)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if not (num_tokens and head_dim and num_heads + num_kv_heads):
        return
    sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    device = launch_device(q)
    tile = resolve_tiles(op, device=device, dtype=q.dtype, **sizes)
    groups = triton.cdiv(num_heads, tile.BLOCK_M) + triton.cdiv(num_kv_heads, tile.BLOCK_M)
    q_weight, k_weight = norms or (None, None)
    _rope_kv_write_kernel[(num_tokens * groups,)](
        q,
        k,
        v,
        q_weight,
        k_weight,
        positions,
        cos_sin,
        slot_mapping,
        k_pool,
        v_pool,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cos_sin.stride(0),
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        k_pool.shape[0],
        num_heads,
        num_kv_heads,
        eps,
        HALF=head_dim // 2,
        **tile.launch(),
        **dependent_launch(device),
    )


@triton.jit
def _rope_kv_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    k_pool_ptr,
    v_pool_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    cos_sin_stride,
    k_pool_stride,
    k_pool_head_stride,
    v_pool_stride,
    v_pool_head_stride,
    num_rows,
    num_heads,
    num_kv_heads,
    eps,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    q_groups = tl.cdiv(num_heads, BLOCK_M)
    groups = q_groups + tl.cdiv(num_kv_heads, BLOCK_M)  # rows and groups both on axis 0: the others stop at 65,535
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups

    pairs = tl.arange(0, BLOCK_N)[None, :]
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride + pairs
    cos = tl.load(angles, mask=pairs < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)
    slot = tl.load(slot_mapping_ptr + token)
    q_weight, k_weight = None, None
    if q_weight_ptr is not None:
        q_weight, k_weight = _halves(q_weight_ptr, pairs, HALF), _halves(k_weight_ptr, pairs, HALF)
    wait_for_inputs(PDL, False)

    if group < q_groups:
        heads = (group * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        inside = (heads < num_heads) & (pairs < HALF)  # [M, N]
        q_ptrs = q_ptr + token * q_stride + heads * q_head_stride + pairs
        first, second = _turned(q_ptrs, q_weight, inside, pairs, cos, sin, eps, HALF)
        tl.store(q_ptrs, first.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(q_ptrs + HALF, second.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        if (slot >= 0) & (slot < num_rows):  # -1 is padding
            row = slot.to(tl.int64)  # row * stride passes 2**31 in pools that fit on a card
            heads = ((group - q_groups) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
            inside = (heads < num_kv_heads) & (pairs < HALF)
            k_ptrs = k_ptr + token * k_stride + heads * k_head_stride + pairs
            first, second = _turned(k_ptrs, k_weight, inside, pairs, cos, sin, eps, HALF)
            v_ptrs = v_ptr + token * v_stride + heads * v_head_stride + pairs
            first_value = tl.load(v_ptrs, mask=inside, other=0.0)
            second_value = tl.load(v_ptrs + HALF, mask=inside, other=0.0)

            k_pool_ptrs = k_pool_ptr + row * k_pool_stride + heads * k_pool_head_stride + pairs
            v_pool_ptrs = v_pool_ptr + row * v_pool_stride + heads * v_pool_head_stride + pairs
            tl.store(k_pool_ptrs, first.to(k_pool_ptr.dtype.element_ty), mask=inside)
            tl.store(k_pool_ptrs + HALF, second.to(k_pool_ptr.dtype.element_ty), mask=inside)
            tl.store(v_pool_ptrs, first_value, mask=inside)
            tl.store(v_pool_ptrs + HALF, second_value, mask=inside)


@triton.jit
def _halves(weight_ptr, pairs, HALF: tl.constexpr):
    """Both halves of a head's weight, fp32 [1, N] each."""
    first = tl.load(weight_ptr + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
    return first, tl.load(weight_ptr + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)


@triton.jit
def _turned(ptrs, weight, inside, pairs, cos, sin, eps, HALF: tl.constexpr):
    """Both halves of some heads [M, N] in fp32, normed where there is a weight, and turned."""
    first = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(ptrs + HALF, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        first *= scale * weight[0]
        second *= scale * weight[1]
    return first * cos - second * sin, second * cos + first * sin
