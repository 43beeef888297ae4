"""4-bit floating-point weights in plain torch: a few rows at a time become fp32 and are multiplied; and their quantiser."""

from collections.abc import Callable

import torch

from rapid_llm.kernels.ops.quantization.fp4_inputs import check_mxfp4_gemm, check_nvfp4_gemm, check_quantize_nvfp4

_CHUNK = 1 << 20  # elements of the weight that are fp32 at one time: 4 MiB, which a CPU's cache holds until they are multiplied
_LARGEST_SCALE = 448.0
_NAN_BITS = 0x7FC00000  # of fp32
# Where one code ends and the next begins, and whether the value between them takes the upper code, which is then the even one.
_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def nvfp4_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    global_scales: torch.Tensor,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write x @ (e2m1 * scales * global_scales).T (+ bias), accumulated in fp32, into ``out`` and return it.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; k a multiple of 16; inner stride 1, row stride free.
        weight: [n, k / 2], uint8, two e2m1 codes a byte: element 2i in the low half, 2i + 1 in the high one; inner stride 1,
            rows begin on 4 bytes.
        scales: [n, k / 16], float8_e4m3fn; inner stride 1, row stride free.
        global_scales: [n], fp32, any stride.
        out: [num_tokens, n], dtype and device of x, apart from it; inner stride 1, row stride free.
        bias: [n], dtype of x, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/quantization/fp4.py::nvfp4_gemm. Origin: this repo.
    """
    check_nvfp4_gemm(x, weight, scales, global_scales, out, bias)

    def scales_of(chunk: slice) -> torch.Tensor:
        return scales[chunk].to(torch.float32)

    return _product(x, weight, scales_of, global_scales, 1.0, out, bias)


def mxfp4_gemm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Write x @ (e2m1 * 2 ** (scales - 127)).T (+ bias), accumulated in fp32, into ``out`` and return it.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; k a multiple of 32; inner stride 1, row stride free.
        weight: [n, k / 2], uint8, two e2m1 codes a byte: element 2i in the low half, 2i + 1 in the high one; inner stride 1,
            rows begin on 4 bytes.
        scales: [n, k / 32], uint8, biased exponents of powers of two (e8m0); 255 is NaN. Inner stride 1, row stride free.
        out: [num_tokens, n], dtype and device of x, apart from it; inner stride 1, row stride free.
        bias: [n], dtype of x, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/quantization/fp4.py::mxfp4_gemm. Origin: this repo.
    """
    check_mxfp4_gemm(x, weight, scales, out, bias)

    def scales_of(chunk: slice) -> torch.Tensor:
        # A quarter of each, so that 6 times the largest is a number; the product makes up for it. The least three are subnormal.
        exponents = scales[chunk].to(torch.int32)
        bits = torch.where(exponents > 2, exponents - 2 << 23, 1 << 20 + exponents.clamp(max=2))
        return bits.masked_fill_(exponents == 255, _NAN_BITS).view(torch.float32)

    return _product(x, weight, scales_of, None, 4.0, out, bias)


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
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/quantization/fp4.py::quantize_nvfp4. Origin: this repo.
    """
    check_quantize_nvfp4(x, global_scale, out, scales)
    if not out.numel():
        return out
    groups = x.to(torch.float32).view(x.shape[0], -1, 16)
    sizes = groups.abs()
    wanted = sizes.amax(2).div_(global_scale).div_(6.0).clamp_(max=_LARGEST_SCALE)
    scale_bytes = scales.view(torch.uint8).copy_(wanted.to(torch.float8_e4m3fn).view(torch.uint8)).clamp_(min=1)
    steps = scale_bytes.view(torch.float8_e4m3fn).to(torch.float32).mul_(global_scale).unsqueeze(2)
    codes = (groups < 0).to(torch.uint8).mul_(8)
    for middle, up in _STEPS:
        codes += sizes >= steps * middle if up else sizes > steps * middle
    pairs = codes.view(x.shape[0], -1, 2)
    return torch.bitwise_or(pairs[:, :, 0], pairs[:, :, 1] << 4, out=out)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales_of: Callable[[slice], torch.Tensor],
    global_scales: torch.Tensor | None,
    factor: float,
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Into ``out``: x times the scaled rows, times ``factor`` and what each output has, a chunk of outputs at a time."""
    (num_tokens, k), n = x.shape, out.shape[1]
    if not num_tokens:
        return out
    pairs, wide = _every_pair(x.device), x.to(torch.float32)  # no copy of what is fp32
    rows = max(_CHUNK // k, 1)
    for start in range(0, n, rows):
        chunk = slice(start, min(start + rows, n))
        scales = scales_of(chunk)
        numbers = (
            pairs.index_select(0, weight[chunk].reshape(-1).to(torch.int32)).view(*scales.shape, -1).mul_(scales.unsqueeze(2))
        )
        product = torch.mm(wide, numbers.view(-1, k).t())
        if factor != 1.0:
            product.mul_(factor)
        if global_scales is not None:
            product.mul_(global_scales[chunk])
        if bias is not None:
            product.add_(bias[chunk])
        out[:, chunk] = product
    return out


def _every_pair(device: torch.device) -> torch.Tensor:
    """The two numbers of each byte, fp32 [256, 2]."""
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    every = torch.tensor([*half, *(-value for value in half)], device=device)
    return torch.stack((every.repeat(16), every.repeat_interleave(16)), dim=1)
