"""Linear layers with quantised weights in plain torch: a few rows of the weight at a time become fp32 and are multiplied."""

from collections.abc import Callable

import torch

from rapid_llm.kernels.ops.quantization.weight_only_inputs import check_w4a16_gemm, check_w8a16_gemm

_CHUNK = 1 << 20  # elements of the weight that are fp32 at one time: 4 MiB, which a CPU's cache holds until they are multiplied


def w8a16_gemm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Write x @ (weight * scales).T (+ bias), accumulated in fp32, into ``out`` and return it.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        weight: [n, k], int8 | float8_e4m3fn; inner stride 1, row stride free.
        scales: fp32: [n], one an output, any stride; or [n, k / group], inner stride 1. A group is a power of two from 16 on.
        out: [num_tokens, n], dtype and device of x, apart from it; inner stride 1, row stride free.
        bias: [n], dtype of x, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/quantization/weight_only.py::w8a16_gemm. Origin: this repo.
    """
    group = check_w8a16_gemm(x, weight, scales, out, bias)

    every_e4m3 = torch.arange(256, dtype=torch.uint8, device=x.device).view(torch.float8_e4m3fn).to(torch.float32)

    def numbers(chunk: slice) -> torch.Tensor:
        part = weight[chunk]
        if part.dtype == torch.int8:
            return part.to(torch.float32)
        # Looked up, since torch converts e4m3 on a CPU seven times slower than that.
        return every_e4m3.index_select(0, part.view(torch.uint8).reshape(-1).to(torch.int32)).view(part.shape)

    return _product(x, numbers, scales.view(-1, 1) if scales.dim() == 1 else scales, group, out, bias)


def w4a16_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    out: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write x @ ((codes - zeros) * scales).T (+ bias), accumulated in fp32, into ``out`` and return it.

    Args:
        x: [num_tokens, k], fp32 | bf16 | fp16; inner stride 1, row stride free.
        weight: [n, k / 2], uint8, two codes a byte: element 2i in the low half, 2i + 1 in the high one; inner stride 1, row
            stride free.
        scales: [n, k / group], dtype of x or fp32; inner stride 1, row stride free. A group is a power of two from 16 to 1024,
            or all of k.
        out: [num_tokens, n], dtype and device of x, apart from it; inner stride 1, row stride free.
        zeros: [n, k / group], uint8, the code 0..15 that stands for 0, a byte each; or fp32, any number in its place; inner
            stride 1, row stride free. None is 8.
        bias: [n], dtype of x, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/quantization/weight_only.py::w4a16_gemm. Origin: this repo.
    """
    group = check_w4a16_gemm(x, weight, scales, out, zeros, bias)
    k = x.shape[1]

    def numbers(chunk: slice) -> torch.Tensor:
        packed = weight[chunk]
        codes = torch.stack((packed & 15, packed >> 4), dim=2).view(-1, k).to(torch.float32)
        if zeros is None:
            return codes.sub_(8)
        codes.view(codes.shape[0], -1, group).sub_(zeros[chunk].unsqueeze(2))
        return codes

    return _product(x, numbers, scales, group, out, bias)


def _product(
    x: torch.Tensor,
    numbers: Callable[[slice], torch.Tensor],
    scales: torch.Tensor,
    group: int,
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Into ``out``: x times the scaled rows that ``numbers`` gives as fp32, a chunk of outputs at a time."""
    (num_tokens, k), n = x.shape, out.shape[1]
    if not num_tokens:
        return out
    wide = x.to(torch.float32)  # no copy of what is fp32
    rows = max(_CHUNK // k, 1)
    for start in range(0, n, rows):
        chunk = slice(start, min(start + rows, n))
        weight = numbers(chunk)
        if group != k:
            weight.view(weight.shape[0], -1, group).mul_(scales[chunk].unsqueeze(2))
        product = torch.mm(wide, weight.t())
        if group == k:
            product.mul_(scales[chunk, 0])
        if bias is not None:
            product.add_(bias[chunk])
        out[:, chunk] = product
    return out
