"""Linear layer with a weight of e2m1 codes and an e4m3 scale for each 16 along k, and its quantiser.

The product's kernel is that of fp4_product.py. The quantiser is bound by memory: one program per (token, tile of groups), a group
within a thread or two. It encodes e4m3 in integers, since below sm89 there is none.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.quantization.fp4_inputs import check_nvfp4_gemm, check_quantize_nvfp4
from rapid_llm.kernels.ops.quantization.fp4_product import launch_product
from rapid_llm.kernels.ops.tile_policy import resolve_tiles


def nvfp4_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    global_scales: torch.Tensor,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write x @ (e2m1 * scales * global_scales).T (+ bias), accumulated in fp32 and rounded once, into ``out`` and return it.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; k a multiple of 16; inner stride 1, row stride free.
        weight: [n, k / 2], uint8, two e2m1 codes a byte: element 2i in the low half, 2i + 1 in the high one; inner stride 1,
            rows begin on 4 bytes. From sm90 on it may be read before the kernel launched last has ended, so it is not what that
            one writes.
        scales: [n, k / 16], float8_e4m3fn; inner stride 1, row stride free.
        global_scales: [n], fp32, any stride.
        out: [num_tokens, n], dtype and device of x, apart from it; inner stride 1, row stride free.
        bias: [n], dtype of x, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/quantization/fp4.py::nvfp4_gemm. Origin: this repo; the format is NVIDIA's, as in
    https://arxiv.org/abs/2509.25149.
    """
    check_nvfp4_gemm(x, weight, scales, global_scales, out, bias)
    return launch_product("nvfp4_gemm", x, weight, scales, global_scales, bias, out)


def quantize_nvfp4(x: torch.Tensor, global_scale: torch.Tensor, *, out: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Write x as e2m1 codes into ``out``, the e4m3 scales of its groups into ``scales``, and return ``out``.

    A scale is amax / global / 6, rounded to the nearest e4m3 number, but never 0 and never above 448; that of a group with a NaN
    is NaN, so that nobody takes its codes for numbers. A code is the e2m1 number nearest to x / (scale * global), 6 for all that
    is larger. Ties go to the even one in both, and the maths is fp32.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; k a multiple of 16; inner stride 1, row stride free.
        global_scale: [1], fp32, a normal number above 0; value = e2m1 * scale * global.
        out: [num_tokens, k / 2], uint8, two codes a byte: element 2i in the low half, 2i + 1 in the high one; inner stride 1, row
            stride free.
        scales: [num_tokens, k / 16], float8_e4m3fn; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/quantization/fp4.py::quantize_nvfp4. Origin: this repo.
    """
    check_quantize_nvfp4(x, global_scale, out, scales)
    num_tokens, k = x.shape
    if num_tokens and k:
        device = launch_device(x)
        tile = resolve_tiles("quantize_nvfp4", device=device, dtype=x.dtype, num_tokens=num_tokens, k=k).launch()
        grid = (num_tokens, triton.cdiv(k, tile["BLOCK_N"]))
        _quantize_nvfp4_kernel[grid](
            x, global_scale, out, scales.view(torch.uint8), x.stride(0), out.stride(0), scales.stride(0), k,
            **tile, **dependent_launch(device),
        )  # fmt: skip
    return out


@triton.jit
def _quantize_nvfp4_kernel(
    x_ptr,
    global_scale_ptr,
    out_ptr,
    scales_ptr,
    x_stride,
    out_stride,
    scales_stride,
    k,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)  # row * stride can pass 2**31
    first = tl.program_id(1) * BLOCK_N
    GROUPS: tl.constexpr = BLOCK_N // 16
    cols = first + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < k, other=0.0).to(tl.float32).reshape(GROUPS, 16)
    global_scale = tl.load(global_scale_ptr)

    sizes = tl.abs(x)
    is_nan = tl.max((sizes != sizes).to(tl.int32), axis=1) > 0  # the largest number passes over it
    wanted = tl.div_rn(tl.div_rn(tl.max(sizes, axis=1), global_scale), 6.0)
    scale_bytes = tl.where(is_nan, 0x7F, tl.maximum(_e4m3_bytes(wanted), 1))
    steps = tl.where(is_nan, float("nan"), _e4m3_values(scale_bytes)) * global_scale
    codes = _e2m1_codes(sizes, steps[:, None]) | (x < 0.0).to(tl.int32) << 3

    low, high = tl.split(codes.reshape(BLOCK_N // 2, 2))
    pairs = first // 2 + tl.arange(0, BLOCK_N // 2)
    tl.store(out_ptr + row * out_stride + pairs, (low | high << 4).to(tl.uint8), mask=pairs < k // 2)
    groups = first // 16 + tl.arange(0, GROUPS)
    tl.store(scales_ptr + row * scales_stride + groups, scale_bytes.to(tl.uint8), mask=groups < k // 16)


@triton.jit
def _e4m3_bytes(numbers):
    """fp32 numbers from 0 on as bytes of e4m3: to nearest, ties to even, at most 448.

    A sum with 16,384 rounds to steps of 2**-9, which are those of subnormal bytes and of the first normal ones; above, 20 bits
    of the mantissa are rounded off, and a carry goes where it belongs, into the exponent.
    """
    numbers = tl.minimum(numbers, 448.0)
    bits = numbers.to(tl.int32, bitcast=True)
    small = (numbers + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    return tl.where(numbers < 0.015625, small, normal)


@triton.jit
def _e4m3_values(scale_bytes):
    """Bytes of e4m3 from 0 to 126 as fp32, exactly."""
    return (scale_bytes << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def _e2m1_codes(sizes, steps):
    """How many of the places halfway between neighbouring codes lie below; one of them itself takes the even code."""
    codes = (sizes > 0.25 * steps).to(tl.int32) + (sizes >= 0.75 * steps).to(tl.int32)
    codes += (sizes > 1.25 * steps).to(tl.int32) + (sizes >= 1.75 * steps).to(tl.int32)
    codes += (sizes > 2.5 * steps).to(tl.int32) + (sizes >= 3.5 * steps).to(tl.int32)
    return codes + (sizes > 5.0 * steps).to(tl.int32)
