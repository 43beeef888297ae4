"""Rotary position embedding in plain torch, NeoX halves (Su et al. 2021, arXiv:2104.09864)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rapid_llm.kernels.ops.rotary.inputs import check_rope


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate the first rotary_dim entries of every head of q and k in place; fp32 maths, the other entries stay.

    Entry i of the first half and entry i of the second half form one pair, turned by the angle of frequency i.

    Args:
        q: [num_tokens, num_heads, head_dim], fp32 | bf16 | fp16; inner stride 1, the others free.
        k: [num_tokens, num_kv_heads, head_dim], same dtype; inner stride 1, the others free; apart from q.
        positions: [num_tokens], int32, each 0 <= id < max_positions; stride 1.
        cos_sin: [max_positions, rotary_dim], fp32; rotary_dim / 2 cosines, then as many sines; inner stride 1.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/rotary.py::rope. Origin: this repo.
    """
    check_rope(q, k, positions, cos_sin)
    if q.shape[0]:
        half = cos_sin.shape[1] // 2
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=2)  # [T, 1, R / 2]
        for heads in _together(q, k):
            _rotate(heads.narrow(2, 0, half), heads.narrow(2, half, half), cos, sin)


def prepare_rope(
    shared: dict[Any, Any], q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[Callable[[], object], ...]:
    """The calls that repeat ``rope`` on the same tensors; none of its own below fp32."""
    if q.dtype != torch.float32:
        return ()
    half = cos_sin.shape[1] // 2
    calls: list[Callable[[], object]] = []
    if ("rope", id(positions), id(cos_sin)) not in shared:  # the first layer's call looks the angles up for all
        angles = cos_sin.index_select(0, positions)
        shared["rope", id(positions), id(cos_sin)] = angles
        calls.append(partial(torch.index_select, cos_sin, 0, positions, out=angles))
    cos, sin = shared["rope", id(positions), id(cos_sin)].unsqueeze(1).chunk(2, dim=2)
    for heads in _together(q, k):
        first, second = heads.narrow(2, 0, half), heads.narrow(2, half, half)
        crossed = first * sin
        calls += [
            partial(torch.mul, first, sin, out=crossed),
            partial(first.mul_, cos),
            partial(first.addcmul_, second, sin, value=-1.0),
            partial(second.mul_, cos),
            partial(second.add_, crossed),
        ]
    return tuple(calls)


def _together(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q and k as one tensor where k's heads follow q's in memory, as they do in a fused projection: half the calls."""
    strides, k_starts = q.stride(), q.data_ptr() + q.shape[1] * q.stride(1) * q.element_size()
    # Two allocations may touch: only inside one of them may a view reach from q to k.
    one_allocation = q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    if one_allocation and k.stride() == strides and k.data_ptr() == k_starts:
        return (q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), strides),)
    return q, k


def _rotate(first: torch.Tensor, second: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn the pairs (first, second), both [T, H, R / 2], in place. The fp32 angles promote every product."""
    if first.dtype == torch.float32:
        crossed = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1.0)
        second.mul_(cos).add_(crossed)
        return
    turned = (first * cos).addcmul_(second, sin, value=-1.0)
    second.copy_((second * cos).addcmul_(first, sin))
    first.copy_(turned)
