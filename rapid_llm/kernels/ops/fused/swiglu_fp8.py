"""SwiGLU as e4m3 numbers and their scales, for devices that have e4m3 in hardware. Memory-bound.

A scale a token: one program covers a row, in registers where it fits, and computes a wider one twice, once for the largest
magnitude and once to round. A scale for each 128 of d: a program covers some groups of 128 and shares nothing with the others.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.fused.inputs import check_swiglu_fp8
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.primitives.e4m3 import casts_in_two_steps, e4m3_scale, to_e4m3
from rapid_llm.kernels.ops.primitives.magnitudes import finite_magnitudes
from rapid_llm.kernels.ops.primitives.scales import GROUP
from rapid_llm.kernels.ops.tile_policy import resolve_tiles


def swiglu_fp8(gate_up: torch.Tensor, *, out: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Write silu(gate) * up, computed in fp32, as quantize_fp8 does into ``out`` and return it; the scales into ``scales``.

    Args:
        gate_up: [num_tokens, 2 * d], fp32 | bf16 | fp16; gate first; inner stride 1, row stride free.
        out: [num_tokens, d], float8_e4m3fn, same device; inner stride 1, row stride free.
        scales: fp32, any strides: [num_tokens] (or [num_tokens, 1]), one a token; or [num_tokens, ceil(d / 128)].
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/fused.py::swiglu_fp8. Origin: this repo.
    """
    group = check_swiglu_fp8(gate_up, out, scales)
    num_tokens, d = out.shape
    if not num_tokens:
        return out
    device = launch_device(out)
    sizes = {"num_tokens": num_tokens, "d": d, "group": group}
    tile = resolve_tiles("swiglu_fp8", device=device, dtype=gate_up.dtype, **sizes).launch()
    two_steps, pdl = casts_in_two_steps(device), dependent_launch(device)
    if group == d:
        tile.pop("BLOCK_M", None)
        _swiglu_rows_kernel[(num_tokens,)](
            gate_up, out, scales, gate_up.stride(0), out.stride(0), scales.stride(0), d,
            LOOPED=d > tile["BLOCK_N"], TWO_STEPS=two_steps, **tile, **pdl,
        )  # fmt: skip
        return out
    tile["BLOCK_N"] = GROUP
    groups = triton.cdiv(d, GROUP)
    across = min(triton.next_power_of_2(groups), tile["BLOCK_M"])  # groups of one token in a program
    grid = (triton.cdiv(num_tokens, tile["BLOCK_M"] // across) * triton.cdiv(groups, across),)
    _swiglu_groups_kernel[grid](
        gate_up, out, scales, gate_up.stride(0), out.stride(0), scales.stride(0), scales.stride(1), num_tokens, d,
        ACROSS=across, TWO_STEPS=two_steps, **tile, **pdl,
    )  # fmt: skip
    return out


@triton.jit
def _swiglu_rows_kernel(
    gate_up_ptr,
    out_ptr,
    scales_ptr,
    gate_up_stride,
    out_stride,
    scales_stride,
    d,
    LOOPED: tl.constexpr,
    TWO_STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)  # row * stride can pass 2**31
    cols = tl.arange(0, BLOCK_N)
    gate_row, out_row = gate_up_ptr + row * gate_up_stride, out_ptr + row * out_stride

    if LOOPED:
        largest = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, d, BLOCK_N):
            gated = _swiglu(gate_row + start + cols, d, start + cols < d)
            largest = tl.maximum(largest, finite_magnitudes(gated))
        scale = e4m3_scale(tl.max(largest, 0))
        for start in range(0, d, BLOCK_N):
            gated = _swiglu(gate_row + start + cols, d, start + cols < d)
            tl.store(out_row + start + cols, to_e4m3(gated, scale, TWO_STEPS), mask=start + cols < d)
    else:
        gated = _swiglu(gate_row + cols, d, cols < d)
        scale = e4m3_scale(tl.max(finite_magnitudes(gated), 0))
        tl.store(out_row + cols, to_e4m3(gated, scale, TWO_STEPS), mask=cols < d)
    tl.store(scales_ptr + row * scales_stride, scale)


@triton.jit(do_not_specialize=["num_tokens"])
def _swiglu_groups_kernel(
    gate_up_ptr,
    out_ptr,
    scales_ptr,
    gate_up_stride,
    out_stride,
    scales_stride,
    scales_stride_d,
    num_tokens,
    d,
    ACROSS: tl.constexpr,
    TWO_STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    # BLOCK_M groups of BLOCK_N elements: ACROSS of each of some tokens. All programs on axis 0: the others stop at 65,535.
    tiles = tl.cdiv(tl.cdiv(d, BLOCK_N), ACROSS)
    within = tl.arange(0, BLOCK_M)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * (BLOCK_M // ACROSS) + within // ACROSS  # times a stride past 2**31
    groups = tl.program_id(0) % tiles * ACROSS + within % ACROSS
    cols = groups[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < num_tokens)[:, None] & (cols < d)

    gated = _swiglu(gate_up_ptr + rows[:, None] * gate_up_stride + cols, d, inside)
    scale = e4m3_scale(tl.max(finite_magnitudes(gated), 1))
    scales_ptrs = scales_ptr + rows * scales_stride + groups.to(tl.int64) * scales_stride_d
    tl.store(scales_ptrs, scale, mask=(rows < num_tokens) & (groups * BLOCK_N < d))
    tl.store(out_ptr + rows[:, None] * out_stride + cols, to_e4m3(gated, scale[:, None], TWO_STEPS), mask=inside)


@triton.jit
def _swiglu(gate_ptrs, d, inside):
    """silu(gate) * up in fp32; up lies ``d`` behind gate."""
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + d, mask=inside, other=0.0).to(tl.float32)
    return gate * tl.sigmoid(gate) * up
