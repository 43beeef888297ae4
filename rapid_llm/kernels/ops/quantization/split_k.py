"""Products whose sum over k is shared out among programs: each writes its part in fp32, a second kernel adds them in order."""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs

_WIDTH = 1024


def merge_parts(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write the sum of ``parts`` [splits, num_tokens, n], fp32 and dense, (+ bias [n]) into ``out`` [num_tokens, n]."""
    splits, num_tokens, n = parts.shape
    grid = (num_tokens * triton.cdiv(n, _WIDTH),)
    _merge_parts_kernel[grid](
        parts, bias, out, out.stride(0), num_tokens, n,
        SPLITS=splits, WIDTH=_WIDTH, num_warps=4, **dependent_launch(launch_device(out)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _merge_parts_kernel(
    parts_ptr,
    bias_ptr,
    out_ptr,
    out_stride,
    num_tokens,
    n,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    tiles = tl.cdiv(n, WIDTH)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    cols = tl.program_id(0) % tiles * WIDTH + tl.arange(0, WIDTH)
    mask = cols < n
    total = tl.zeros((WIDTH,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + (split * num_tokens.to(tl.int64) + row) * n + cols, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, total.to(out_ptr.dtype.element_ty), mask=mask)
