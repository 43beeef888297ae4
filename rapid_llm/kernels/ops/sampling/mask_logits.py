"""Logits in which only the tokens that a bit mask allows are left: how a grammar has its say.

Memory-bound; one program per (row, column tile). A tile's mask is loaded once, a word for 32 columns.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.sampling.mask_inputs import check_mask_logits

WORDS = 64
WORD_BITS = tl.constexpr(32)


def mask_logits(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write the logits into ``out``, -inf in place of those that a row's mask does not allow, and return it.

    Bit ``id % 32`` of word ``id // 32`` allows a token. A row whose ``mask_rows`` is -1 is copied. A NaN stays one.

    Args:
        logits: [num_seqs, vocab_size], fp32 | bf16 | fp16; inner stride 1, row stride free.
        masks: [num_masks, ceil(vocab_size / 32)], int32; inner stride 1, row stride free.
        mask_rows: [num_seqs], int32, -1 <= row < num_masks; stride 1.
        out: [num_seqs, vocab_size], fp32, no part of ``logits``; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/sampling.py::mask_logits. Origin: this repo; the layout of the mask is llguidance's
    (https://github.com/guidance-ai/llguidance).
    """
    check_mask_logits(logits, masks, mask_rows, out)
    num_seqs, vocab_size = logits.shape
    if num_seqs:
        grid = (num_seqs * triton.cdiv(vocab_size, WORDS * WORD_BITS.value),)
        _mask_kernel[grid](
            logits,
            masks,
            out,
            mask_rows,
            logits.stride(0),
            masks.stride(0),
            out.stride(0),
            vocab_size,
            WORDS=WORDS,
            num_warps=4,
            num_stages=1,
            **dependent_launch(launch_device(logits)),
        )
    return out


@triton.jit
def _mask_kernel(
    logits_ptr,
    masks_ptr,
    out_ptr,
    mask_rows_ptr,
    logits_stride,
    masks_stride,
    out_stride,
    vocab_size,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    num_words = tl.cdiv(vocab_size, WORD_BITS)
    num_tiles = tl.cdiv(num_words, WORDS)
    program = tl.program_id(0)
    row = (program // num_tiles).to(tl.int64)
    words = program % num_tiles * WORDS + tl.arange(0, WORDS)
    bits = tl.arange(0, WORD_BITS)
    cols = words[:, None] * WORD_BITS + bits[None, :]
    inside = cols < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + cols, mask=inside, other=0.0).to(tl.float32)

    mask_row = tl.load(mask_rows_ptr + row).to(tl.int64)
    if mask_row >= 0:
        allowed = tl.load(masks_ptr + mask_row * masks_stride + words, mask=words < num_words, other=0)
        keep = ((allowed[:, None] >> bits[None, :]) & 1) != 0
        logits = tl.where(keep | (logits != logits), logits, float("-inf"))

    tl.store(out_ptr + row * out_stride + cols, logits, mask=inside)
