"""What the sampling kernels share: how a row of logits is cut into splits, packed into keys and merged.

A key is one int64 per token that ascends in the canonical order, largest score first, ties by ascending id: the score's bits
above, the id below. No two keys of a row are equal, so a cut between keys says all about ties.
"""

import triton
import triton.language as tl

MAX_VOCAB: int = 1 << 20
ID_BITS = tl.constexpr(20)  # of a key
ID_MASK = tl.constexpr((1 << 20) - 1)
NO_KEY = tl.constexpr((1 << 63) - 1)  # behind every key: no token


@triton.jit
def load_scores(row_ptr, cols, vocab_size):
    """Logits of one row as fp32; -inf past the vocabulary, so that no such column ever wins."""
    return tl.load(row_ptr + cols, mask=cols < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def peak_of(scores):
    """The largest score of a split; NaN where it holds one."""
    broken = tl.max((scores != scores).to(tl.int32), 0)  # a maximum passes over NaN
    return tl.where(broken > 0, float("nan"), tl.max(scores, 0))


@triton.jit
def row_peak(peaks_ptr, num_splits, SPLITS: tl.constexpr):
    """The largest score of a row from those of its splits, and whether the row is sound: no NaN, something above -inf."""
    splits = tl.arange(0, SPLITS)
    peaks = tl.load(peaks_ptr + splits, mask=splits < num_splits, other=float("-inf"))
    peak = tl.max(peaks, 0)
    broken = tl.max((peaks != peaks).to(tl.int32), 0)
    return peak, (broken == 0) & (peak > float("-inf"))


@triton.jit
def pack(bits, ids, vocab_size):
    """Keys of non-negative or signed int32 ``bits`` that ascend as scores fall; NO_KEY past the vocabulary."""
    keys = (bits.to(tl.int64) << ID_BITS) | ids.to(tl.int64)
    return tl.where(ids < vocab_size, keys, NO_KEY)


@triton.jit
def ids_of(keys):
    """Token ids of keys, int32."""
    return (keys & ID_MASK).to(tl.int32)


@triton.jit
def bits_of(keys):
    """The int32 that ``pack`` was given."""
    return (keys >> ID_BITS).to(tl.int32)
