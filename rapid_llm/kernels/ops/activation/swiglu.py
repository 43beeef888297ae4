"""SwiGLU: silu(gate) * up over a fused gate-up row. Memory-bound; one program per (row, column tile)."""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.activation.inputs import check_swiglu
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.tile_policy import resolve_tiles


def swiglu(gate_up: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write silu(gate) * up, computed in fp32, into ``out`` and return it.

    Args:
        gate_up: [num_tokens, 2 * d], fp32 | bf16 | fp16; gate first; inner stride 1, row stride free.
        out: [num_tokens, d], same dtype and device, apart from gate_up; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/activation.py::swiglu. Origin: this repo.
    """
    check_swiglu(gate_up, out)
    num_tokens, d = out.shape
    if num_tokens and d:
        device = launch_device(out)
        tile = resolve_tiles("swiglu", device=device, dtype=out.dtype, num_tokens=num_tokens, d=d)
        grid = (num_tokens, triton.cdiv(d, tile.BLOCK_N))  # tokens on axis 0: the others stop at 65,535
        _swiglu_kernel[grid](gate_up, out, gate_up.stride(0), out.stride(0), d, **tile.launch(), **dependent_launch(device))
    return out


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, gate_up_stride, out_stride, d, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)  # row * stride can pass 2**31
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < d

    gate_ptrs = gate_up_ptr + row * gate_up_stride + cols
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + d, mask=inside, other=0.0).to(tl.float32)

    result = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * out_stride + cols, result.to(out_ptr.dtype.element_ty), mask=inside)
