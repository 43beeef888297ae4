"""Penalties and edits of logits, in fp32: what a request asks for beyond the model's own distribution.

Memory-bound: one program per (row, column tile) copies and penalises; a second launch, only where there are edits, adds them one
by one. They go in by atomic adds, since several may name one token; at most one of these is finite, so their order says nothing.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.sampling.inputs import check_adjust_logits

BLOCK_N = 2048
EDITS = 256
COUNT_MASK = tl.constexpr((1 << 30) - 1)


def adjust_logits(
    logits: torch.Tensor,
    counts: torch.Tensor,
    count_rows: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    edit_rows: torch.Tensor,
    edit_ids: torch.Tensor,
    edit_values: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the penalised and edited logits into ``out`` and return it.

    In a row whose ``count_rows`` names a row of counts: a logit of a token that occurred is divided by ``repetition`` where it is
    above 0 and multiplied by it elsewhere; then ``frequency`` times the number of times it was put out is taken away, and
    ``presence`` once if it was. Other rows are copied. Last, each edit's value is added to its token: -inf bans it. A NaN stays.

    Args:
        logits: [num_seqs, vocab_size], fp32 | bf16 | fp16; inner stride 1, row stride free.
        counts: [table_rows, vocab_size], int32, times that a token was put out, plus 2**30 where it occurred in the prompt;
            inner stride 1, row stride free.
        count_rows: [num_seqs], int32, -1 <= row < table_rows; -1 has no penalties; stride 1.
        repetition, presence, frequency: [num_seqs], fp32, repetition > 0; stride 1.
        edit_rows, edit_ids: [num_edits], int32, rows and ids of ``logits``; at most one finite edit a token of a row; stride 1.
        edit_values: [num_edits], fp32, finite or -inf; stride 1.
        out: [num_seqs, vocab_size], fp32, no part of ``logits``; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/sampling.py::adjust_logits. Origin: this repo; repetition penalty as in Keskar et al. 2019
    (https://arxiv.org/abs/1909.05858), the other two as in OpenAI's API.
    """
    check_adjust_logits(logits, counts, count_rows, repetition, presence, frequency, edit_rows, edit_ids, edit_values, out)
    num_seqs, vocab_size = logits.shape
    if not num_seqs:
        return out
    pdl = dependent_launch(launch_device(logits))
    grid = (num_seqs * triton.cdiv(vocab_size, BLOCK_N),)
    _penalise_kernel[grid](
        logits,
        counts,
        repetition,
        presence,
        frequency,
        out,
        count_rows,
        logits.stride(0),
        counts.stride(0),
        out.stride(0),
        vocab_size,
        BLOCK_N=BLOCK_N,
        num_warps=4,
        num_stages=1,
        **pdl,
    )
    num_edits = edit_ids.shape[0]
    if num_edits:
        _edit_kernel[(triton.cdiv(num_edits, EDITS),)](
            edit_values, out, edit_rows, edit_ids, out.stride(0), num_edits, EDITS=EDITS, num_warps=4, num_stages=1, **pdl
        )
    return out


@triton.jit
def _penalise_kernel(
    logits_ptr,
    counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    out_ptr,
    count_rows_ptr,
    logits_stride,
    counts_stride,
    out_stride,
    vocab_size,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    num_tiles = tl.cdiv(vocab_size, BLOCK_N)  # rows and tiles both on axis 0: the others stop at 65,535
    program = tl.program_id(0)
    row = (program // num_tiles).to(tl.int64)
    cols = program % num_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + cols, mask=inside, other=0.0).to(tl.float32)

    count_row = tl.load(count_rows_ptr + row).to(tl.int64)
    if count_row >= 0:
        counts = tl.load(counts_ptr + count_row * counts_stride + cols, mask=inside, other=0)
        repetition = tl.load(repetition_ptr + row)
        repeated = tl.where(logits > 0, logits / repetition, logits * repetition)
        logits = tl.where(counts != 0, repeated, logits)
        num_put_out = counts & COUNT_MASK
        logits -= tl.load(frequency_ptr + row) * num_put_out.to(tl.float32)
        logits -= tl.where(num_put_out > 0, tl.load(presence_ptr + row), 0.0)

    tl.store(out_ptr + row * out_stride + cols, logits, mask=inside)


@triton.jit(do_not_specialize=["num_edits"])
def _edit_kernel(
    edit_values_ptr, out_ptr, edit_rows_ptr, edit_ids_ptr, out_stride, num_edits, EDITS: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    edits = tl.program_id(0) * EDITS + tl.arange(0, EDITS)
    given = edits < num_edits
    rows = tl.load(edit_rows_ptr + edits, mask=given, other=0).to(tl.int64)
    ids = tl.load(edit_ids_ptr + edits, mask=given, other=0)
    values = tl.load(edit_values_ptr + edits, mask=given, other=0.0)
    tl.atomic_add(out_ptr + rows * out_stride + ids, values, mask=given, sem="relaxed")
