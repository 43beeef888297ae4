"""Log-probabilities of the given token and of the n largest of each row, from the raw logits.

Memory-bound while rows are wide. Two launches: one program per (row, split) sums exp and lists its largest tokens by repeated
minima over their keys; one program per row merges the splits. More than 32 columns are taken from the row itself, one walk each.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.sampling.inputs import check_top_logprobs
from rapid_llm.kernels.ops.sampling.logits import (
    MAX_VOCAB,
    NO_KEY,
    bits_of,
    ids_of,
    load_scores,
    pack,
    peak_of,
    row_peak,
)
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_LISTED = 32  # keys of a split's list


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, out_ids: torch.Tensor, out_logprobs: torch.Tensor
) -> torch.Tensor:
    """Write ids and fp32 log-probabilities of the given token (column 0) and of the n largest, and return out_logprobs.

    Log-probabilities are those of the raw logits, +inf counting as the largest; columns 1.. stand in descending order, ties
    by ascending id. A token id of -1 gives (-1, nan) in column 0; a row with a NaN or nothing above -inf gives it everywhere.

    Args:
        logits: [num_seqs, vocab_size], fp32 | bf16 | fp16; vocab_size at most 2**20; inner stride 1, row stride free.
        token_ids: [num_seqs], int32, each -1 <= id < vocab_size; stride 1.
        out_ids: [num_seqs, n + 1], int32, 0 <= n <= vocab_size; inner stride 1, row stride free.
        out_logprobs: [num_seqs, n + 1], fp32; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/sampling.py::top_logprobs. Origin: this repo.
    """
    check_top_logprobs(logits, token_ids, out_ids, out_logprobs, max_vocab=MAX_VOCAB)
    num_seqs, vocab_size = logits.shape
    if not num_seqs:
        return out_logprobs

    n = out_ids.shape[1] - 1
    device = launch_device(logits)
    pdl = dependent_launch(device)
    tile = resolve_tiles("top_logprobs", device=device, dtype=logits.dtype, vocab_size=vocab_size).launch()
    num_splits = triton.cdiv(vocab_size, tile["BLOCK_N"])
    peaks, sums = (logits.new_empty((num_seqs, num_splits), dtype=torch.float32) for _ in range(2))
    keys = logits.new_empty((num_seqs, num_splits, _LISTED), dtype=torch.int64)
    from_list = n <= _LISTED
    _split_kernel[(num_seqs * num_splits,)](
        logits, peaks, sums, keys, logits.stride(0), vocab_size, n if from_list else 0, LISTED=_LISTED, **tile, **pdl
    )
    _merge_kernel[(num_seqs,)](
        logits,
        token_ids,
        peaks,
        sums,
        keys,
        out_ids,
        out_logprobs,
        logits.stride(0),
        out_ids.stride(0),
        out_logprobs.stride(0),
        vocab_size,
        n,
        FROM_LIST=from_list,
        SPLITS=triton.next_power_of_2(num_splits),
        LISTED=_LISTED,
        **tile,
        **pdl,
    )
    return out_logprobs


@triton.jit(do_not_specialize=["num_listed"])
def _split_kernel(
    logits_ptr,
    peaks_ptr,
    sums_ptr,
    keys_ptr,
    logits_stride,
    vocab_size,
    num_listed,
    LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    num_splits = tl.cdiv(vocab_size, BLOCK_N)  # rows and splits both on axis 0: the others stop at 65,535
    program = tl.program_id(0)
    row = (program // num_splits).to(tl.int64)
    cols = program % num_splits * BLOCK_N + tl.arange(0, BLOCK_N)
    scores = load_scores(logits_ptr + row * logits_stride, cols, vocab_size)

    peak = peak_of(scores)
    tl.store(peaks_ptr + program, peak)
    tl.store(sums_ptr + program, tl.sum(tl.exp(_below(scores, peak)), 0))

    keys = pack(_falling_bits(scores), cols, vocab_size)
    own_keys_ptr = keys_ptr + program.to(tl.int64) * LISTED
    for place in range(num_listed):
        first = tl.min(keys, 0)
        tl.store(own_keys_ptr + place, first)
        keys = tl.where(keys == first, NO_KEY, keys)


@triton.jit(do_not_specialize=["n", "out_ids_stride", "out_logprobs_stride"])
def _merge_kernel(
    logits_ptr,
    token_ids_ptr,
    peaks_ptr,
    sums_ptr,
    keys_ptr,
    out_ids_ptr,
    out_logprobs_ptr,
    logits_stride,
    out_ids_stride,
    out_logprobs_stride,
    vocab_size,
    n,
    FROM_LIST: tl.constexpr,
    SPLITS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    num_splits = tl.cdiv(vocab_size, BLOCK_N)
    own = row * num_splits  # the row's place among the splits' results
    row_ptr = logits_ptr + row * logits_stride
    out_ids_row = out_ids_ptr + row * out_ids_stride
    out_logprobs_row = out_logprobs_ptr + row * out_logprobs_stride

    peak, sound = row_peak(peaks_ptr + own, num_splits, SPLITS)
    splits = tl.arange(0, SPLITS)
    peaks = tl.load(peaks_ptr + own + splits, mask=splits < num_splits, other=float("-inf"))
    sums = tl.load(sums_ptr + own + splits, mask=splits < num_splits, other=0.0)
    log_sum = tl.log(tl.sum(tl.where(peaks > float("-inf"), sums * tl.exp(_below(peaks, peak)), 0.0), 0))

    token = tl.load(token_ids_ptr + row)
    known = sound & (token >= 0)
    score = tl.load(row_ptr + token, mask=known, other=0.0).to(tl.float32)
    tl.store(out_ids_row, tl.where(known, token, -1))
    tl.store(out_logprobs_row, tl.where(known, _below(score, peak) - log_sum, float("nan")))

    last = tl.full([], -(1 << 63), tl.int64)  # the key that stands in the column before
    for column in range(n):
        if sound:
            last = _next_key(last, row_ptr, keys_ptr + own * LISTED, vocab_size, num_splits, n, FROM_LIST, LISTED, BLOCK_N)
        tl.store(out_ids_row + 1 + column, tl.where(sound, ids_of(last), -1))
        tl.store(out_logprobs_row + 1 + column, tl.where(sound, _below(_score_of(last), peak) - log_sum, float("nan")))


@triton.jit
def _next_key(
    last, row_ptr, list_ptr, vocab_size, num_splits, n, FROM_LIST: tl.constexpr, LISTED: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The first key of a row behind ``last``, from the lists of its splits or from the row itself."""
    found = tl.full([], NO_KEY, tl.int64)
    length = num_splits * LISTED if FROM_LIST else vocab_size
    for start in range(0, length, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        if FROM_LIST:
            written = (places < length) & (places % LISTED < n)
            keys = tl.load(list_ptr + places, mask=written, other=NO_KEY)
        else:
            keys = pack(_falling_bits(load_scores(row_ptr, places, vocab_size)), places, vocab_size)
        found = tl.minimum(found, tl.min(tl.where(keys > last, keys, NO_KEY), 0))
    return found


@triton.jit
def _below(scores, peak):
    """scores - peak, exactly 0 at the peak, which +inf may be."""
    return tl.where(scores == peak, 0.0, scores - peak)


@triton.jit
def _falling_bits(scores):
    """int32 values that ascend as scores fall; 0.0 and -0.0 are equal."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    return ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))  # of negative floats, the larger bits are those of the smaller number


@triton.jit
def _score_of(key):
    """The score of a key of ``_falling_bits``."""
    rising = ~bits_of(key)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
