"""One token id per row of logits: temperature, top-k, top-p, min-p, and noise that depends on seed, position and id only.

Memory-bound while rows are wide. Three launches, none of which waits for the host:

1. one program per (row, split): the split's largest logit and its id;
2. one program per (row, split) of a row with a temperature: its winner by Gumbel noise, or, where top-k or top-p bounds the row,
   its likeliest tokens as a short list of keys and the mass of all its tokens;
3. one program per row: merges the splits. A bounded row gets a cut: the last key of the prefix that top-k and top-p keep, found
   by bisection over the listed keys, or over the whole row where the lists do not reach that far.

Masses are fixed-point integers, whose sums do not depend on their order: a row gives the same id however it is split and
whatever stands beside it. Noise is Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.sampling.inputs import check_sample
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

_MASS_ONE = tl.constexpr(float(1 << 42))  # the mass of the likeliest token; 2**20 of them stay below 2**63
_LAST_KEY = tl.constexpr((0x7F800000 << 20) + (1 << 20) - 1)  # of z = -inf and the largest id
# One value of each is read a row, so that nothing is gained by knowing where they begin: rows of a table do so anywhere.
_BY_ROW = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr"]
_LEAST_LISTED = 128  # keys that a split lists at least: any smaller top-k never walks the row again


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    out_ids: torch.Tensor,
) -> torch.Tensor:
    """Write one token id per row of logits into ``out_ids`` and return it.

    Temperature 0 takes the lowest id among the largest logits. Else z = (logits - max) / temperature in fp32, +inf counting
    as the max; of the order by descending z, ties by ascending id, top_k keeps the first k, top_p then the shortest prefix
    whose renormalised mass reaches it (one token at least), min_p drops what is less likely than min_p times the likeliest.
    The kept token with the largest z + noise wins, the lowest id among equals; noise depends on seed, position and id only.
    A row with a NaN or with nothing above -inf gets -1 and hurts no other.

    Args:
        logits: [num_seqs, vocab_size], fp32 | bf16 | fp16; vocab_size at most 2**20; inner stride 1, row stride free.
        temperature, top_p, min_p: [num_seqs], fp32; top_p >= 1 and min_p 0 are off; stride 1.
        top_k: [num_seqs], int32; <= 0 or >= vocab_size is off; stride 1.
        seeds: [num_seqs], int64; stride 1.
        positions: [num_seqs], int32; position of the token being drawn; stride 1.
        out_ids: [num_seqs], int32; stride 1.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then.
    Twin: kernels/reference/sampling.py::sample. Origin: this repo; Gumbel-max trick and Philox as published.
    """
    check_sample(logits, temperature, top_k, top_p, min_p, seeds, positions, out_ids, max_vocab=MAX_VOCAB)
    num_seqs, vocab_size = logits.shape
    if not num_seqs:
        return out_ids

    tile = resolve_tiles(
        "sample", device=launch_device(logits), dtype=logits.dtype, num_seqs=num_seqs, vocab_size=vocab_size
    ).launch()
    num_splits = triton.cdiv(vocab_size, tile["BLOCK_N"])
    listed = max(_LEAST_LISTED, tile["BLOCK_N"] // 32)
    peaks, draws = (logits.new_empty((num_seqs, num_splits), dtype=torch.float32) for _ in range(2))
    peak_ids, drawn_ids = (logits.new_empty((num_seqs, num_splits), dtype=torch.int32) for _ in range(2))
    cuts, masses = (logits.new_empty((num_seqs, num_splits), dtype=torch.int64) for _ in range(2))
    keys = logits.new_empty((num_seqs, num_splits, listed), dtype=torch.int64)
    stride, merged = logits.stride(0), triton.next_power_of_2(num_splits)

    _peak_kernel[(num_seqs * num_splits,)](logits, peaks, peak_ids, stride, vocab_size, **tile)
    _draw_kernel[(num_seqs * num_splits,)](
        logits, temperature, top_k, top_p, min_p, seeds, positions, peaks, draws, drawn_ids, keys, cuts, masses,
        stride, vocab_size, SPLITS=merged, LISTED=listed, **tile,
    )  # fmt: skip
    _pick_kernel[(num_seqs,)](
        logits, temperature, top_k, top_p, min_p, seeds, positions, peaks, peak_ids, draws, drawn_ids, keys, cuts, masses,
        out_ids, stride, vocab_size, SPLITS=merged, LISTED=listed, **tile,
    )  # fmt: skip
    return out_ids


@triton.jit
def _peak_kernel(logits_ptr, peaks_ptr, peak_ids_ptr, logits_stride, vocab_size, BLOCK_N: tl.constexpr):
    num_splits = tl.cdiv(vocab_size, BLOCK_N)  # rows and splits both on axis 0: the others stop at 65,535
    row = (tl.program_id(0) // num_splits).to(tl.int64)
    cols = tl.program_id(0) % num_splits * BLOCK_N + tl.arange(0, BLOCK_N)
    scores = load_scores(logits_ptr + row * logits_stride, cols, vocab_size)

    tl.store(peaks_ptr + tl.program_id(0), peak_of(scores))
    tl.store(peak_ids_ptr + tl.program_id(0), _first_largest(scores, cols))


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    peaks_ptr,
    draws_ptr,
    drawn_ids_ptr,
    keys_ptr,
    cuts_ptr,
    masses_ptr,
    logits_stride,
    vocab_size,
    SPLITS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_splits = tl.cdiv(vocab_size, BLOCK_N)
    program = tl.program_id(0)
    row = (program // num_splits).to(tl.int64)
    first = program % num_splits * BLOCK_N
    temperature = tl.load(temperature_ptr + row)
    peak, sound = row_peak(peaks_ptr + row * num_splits, num_splits, SPLITS)

    if sound & (temperature > 0):
        cols = first + tl.arange(0, BLOCK_N)
        z = _scaled(load_scores(logits_ptr + row * logits_stride, cols, vocab_size), peak, temperature)
        if _is_bounded(tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), vocab_size):
            tl.store(masses_ptr + program, tl.sum(_mass(z), 0))
            keys = pack(_falling_bits(z), cols, vocab_size)
            cut = _cut_of_list(keys, LISTED)
            tl.store(cuts_ptr + program, cut)
            listed = keys <= cut
            places = tl.cumsum(listed.to(tl.int32), 0) - 1
            own_keys_ptr = keys_ptr + program.to(tl.int64) * LISTED
            tl.store(own_keys_ptr + places, keys, mask=listed)
            unused = tl.arange(0, LISTED)
            tl.store(own_keys_ptr + unused, NO_KEY, mask=unused >= tl.sum(listed.to(tl.int32), 0))
        else:
            noise = _gumbel(_words_of_span(first, tl.load(seeds_ptr + row), tl.load(positions_ptr + row), BLOCK_N))
            noisy = tl.where(_is_likely(z, tl.load(min_p_ptr + row)), z + noise, float("-inf"))
            tl.store(draws_ptr + program, tl.max(noisy, 0))
            tl.store(drawn_ids_ptr + program, _first_largest(noisy, cols))


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)
def _pick_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    peaks_ptr,
    peak_ids_ptr,
    draws_ptr,
    drawn_ids_ptr,
    keys_ptr,
    cuts_ptr,
    masses_ptr,
    out_ids_ptr,
    logits_stride,
    vocab_size,
    SPLITS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_splits = tl.cdiv(vocab_size, BLOCK_N)
    own = row * num_splits  # the row's place among the splits' results
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    peak, sound = row_peak(peaks_ptr + own, num_splits, SPLITS)

    winner = tl.full([], -1, tl.int32)
    if sound:
        if temperature > 0:
            if _is_bounded(top_k, top_p, vocab_size):
                splits = tl.arange(0, SPLITS)
                complete = tl.min(tl.load(cuts_ptr + own + splits, mask=splits < num_splits, other=NO_KEY), 0)
                total = tl.sum(tl.load(masses_ptr + own + splits, mask=splits < num_splits, other=0), 0)
                winner = _draw_from_prefix(
                    logits_ptr + row * logits_stride,
                    keys_ptr + own * LISTED,
                    complete,
                    total,
                    peak,
                    temperature,
                    top_k,
                    top_p,
                    tl.load(min_p_ptr + row),
                    tl.load(seeds_ptr + row),
                    tl.load(positions_ptr + row),
                    vocab_size,
                    num_splits * LISTED,
                    BLOCK_N,
                )
            else:
                winner = _merged(draws_ptr + own, drawn_ids_ptr + own, num_splits, SPLITS)
        else:
            winner = _merged(peaks_ptr + own, peak_ids_ptr + own, num_splits, SPLITS)
    tl.store(out_ids_ptr + row, winner)


@triton.jit
def _first_largest(values, ids):
    """The lowest id among those of the largest value."""
    return tl.min(tl.where(values == tl.max(values, 0), ids, 0x7FFFFFFF), 0)


@triton.jit
def _merged(values_ptr, ids_ptr, num_splits, SPLITS: tl.constexpr):
    """The winner among the winners of the splits."""
    splits = tl.arange(0, SPLITS)
    values = tl.load(values_ptr + splits, mask=splits < num_splits, other=float("-inf"))
    return _first_largest(values, tl.load(ids_ptr + splits, mask=splits < num_splits, other=0x7FFFFFFF))


@triton.jit
def _scaled(scores, peak, temperature):
    """z of scores, at most 0: correctly rounded, as its ties count; exactly 0 at the peak, which +inf may be."""
    return tl.where(scores == peak, 0.0, tl.div_rn(scores - peak, temperature))


@triton.jit
def _is_bounded(top_k, top_p, vocab_size):
    """Whether a row keeps a prefix of its order only."""
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1)


@triton.jit
def _is_likely(z, min_p):
    """Whether min_p leaves a token; it always leaves the likeliest."""
    return (tl.exp(z) >= min_p) | (z == 0)


@triton.jit
def _mass(z):
    """exp(z) in fixed point."""
    return (tl.exp(z) * _MASS_ONE).to(tl.int64)


@triton.jit
def _falling_bits(z):
    """Bits that ascend as z <= 0 falls; 0.0 and -0.0 are equal."""
    return tl.abs(z).to(tl.int32, bitcast=True)


@triton.jit
def _z_of(keys):
    """z of keys; of NO_KEY it is NaN."""
    return -bits_of(keys).to(tl.float32, bitcast=True)


@triton.jit
def _cut_of_list(keys, LISTED: tl.constexpr):
    """A cut that leaves all keys of a split, or more than half of LISTED and at most LISTED of them."""
    last = tl.max(tl.where(keys == NO_KEY, -1, keys), 0)
    low, count = last, tl.sum((keys <= last).to(tl.int32), 0)
    if count > LISTED:
        high = last
        low, count = tl.min(keys, 0) - 1, tl.full([], 0, tl.int32)
        while count * 2 <= LISTED:
            middle = low + (high - low) // 2
            reached = tl.sum((keys <= middle).to(tl.int32), 0)
            fits = reached <= LISTED
            low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
            count = tl.where(fits, reached, count)
    return tl.where(count < tl.sum((keys != NO_KEY).to(tl.int32), 0), low, _LAST_KEY)


@triton.jit
def _draw_from_prefix(
    row_ptr,
    list_ptr,
    complete,
    total,
    peak,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    vocab_size,
    num_listed,
    BLOCK_N: tl.constexpr,
):
    """The winner of a row that top_k or top_p bounds.

    Every key up to ``complete`` is in the list. If the prefix ends there the list is all that is read, else the row is.
    """
    bounded_by_k = (top_k > 0) & (top_k < vocab_size)
    k = tl.where(bounded_by_k, top_k, vocab_size)
    count, mass, last, _ = _reach(complete, True, row_ptr, list_ptr, peak, temperature, vocab_size, num_listed, BLOCK_N)
    from_list = tl.where(bounded_by_k, count >= k, mass >= _target(top_p, total))
    cut = tl.where(from_list, last, tl.full([], _LAST_KEY, tl.int64))
    count = tl.where(from_list, count, vocab_size)
    mass = tl.where(from_list, mass, total)

    if bounded_by_k:
        cut, count, mass = _cut_of_prefix(
            k, tl.full([], NO_KEY, tl.int64), cut, count, mass,
            from_list, row_ptr, list_ptr, peak, temperature, vocab_size, num_listed, BLOCK_N,
        )  # fmt: skip
        total = mass
    if top_p < 1:
        cut, count, mass = _cut_of_prefix(
            vocab_size + 1, _target(top_p, total), cut, count, mass,
            from_list, row_ptr, list_ptr, peak, temperature, vocab_size, num_listed, BLOCK_N,
        )  # fmt: skip

    best, winner = tl.full([], float("-inf"), tl.float32), tl.full([], 0x7FFFFFFF, tl.int32)
    length = tl.where(from_list, num_listed, vocab_size)
    for start in range(0, length, BLOCK_N):
        keys = _keys_at(start, from_list, row_ptr, list_ptr, peak, temperature, vocab_size, num_listed, BLOCK_N)
        z, ids = _z_of(keys), ids_of(keys)
        kept = (keys <= cut) & _is_likely(z, min_p)
        noisy = tl.where(kept, z + _gumbel(_words_of_ids(ids, seed, position)), float("-inf"))
        largest = tl.max(noisy, 0)
        first = tl.min(tl.where(kept & (noisy == largest), ids, 0x7FFFFFFF), 0)
        better = (largest > best) | ((largest == best) & (first < winner))
        best, winner = tl.where(better, largest, best), tl.where(better, first, winner)
    return winner


@triton.jit
def _target(top_p, total):
    """The mass that a prefix must reach, at least that of one token."""
    exact = top_p.to(tl.float64) * total.to(tl.float64)
    floor = exact.to(tl.int64)
    return tl.maximum(tl.where(floor.to(tl.float64) < exact, floor + 1, floor), 1)


@triton.jit
def _cut_of_prefix(
    wanted_count,
    wanted_mass,
    cut,
    count,
    mass,
    from_list,
    row_ptr,
    list_ptr,
    peak,
    temperature,
    vocab_size,
    num_listed,
    BLOCK_N: tl.constexpr,
):
    """The cut of the shortest prefix with that many tokens or that mass, its count and mass.

    ``cut``, ``count`` and ``mass`` are those of a prefix that reaches it. The bisection goes on while more than one key stands
    between its ends, which move on to keys, so that neither gaps between keys nor ties cost steps.
    """
    low, below = tl.full([], -1, tl.int64), tl.full([], 0, tl.int32)
    while (count - below > 1) & (count != wanted_count):
        middle = low + (cut - low) // 2
        reached, reached_mass, last, following = _reach(
            middle, from_list, row_ptr, list_ptr, peak, temperature, vocab_size, num_listed, BLOCK_N
        )
        enough = (reached >= wanted_count) | (reached_mass >= wanted_mass)
        low, below = tl.where(enough, low, following - 1), tl.where(enough, below, reached)
        cut, count, mass = tl.where(enough, last, cut), tl.where(enough, reached, count), tl.where(enough, reached_mass, mass)
    return cut, count, mass


@triton.jit
def _reach(limit, from_list, row_ptr, list_ptr, peak, temperature, vocab_size, num_listed, BLOCK_N: tl.constexpr):
    """How many keys stand up to ``limit``, their mass, the last of them, and the first behind it."""
    count, mass = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    last, following = tl.full([], -1, tl.int64), tl.full([], NO_KEY, tl.int64)
    length = tl.where(from_list, num_listed, vocab_size)
    for start in range(0, length, BLOCK_N):
        keys = _keys_at(start, from_list, row_ptr, list_ptr, peak, temperature, vocab_size, num_listed, BLOCK_N)
        inside = keys <= limit
        count += tl.sum(inside.to(tl.int32), 0)
        mass += tl.sum(tl.where(inside, _mass(_z_of(keys)), 0), 0)
        last = tl.maximum(last, tl.max(tl.where(inside, keys, -1), 0))
        following = tl.minimum(following, tl.min(tl.where(inside, NO_KEY, keys), 0))
    return count, mass, last, following


@triton.jit
def _keys_at(start, from_list, row_ptr, list_ptr, peak, temperature, vocab_size, num_listed, BLOCK_N: tl.constexpr):
    """A tile of keys [N], read from the list of the row or made from its logits."""
    places = start + tl.arange(0, BLOCK_N)
    if from_list:
        keys = tl.load(list_ptr + places, mask=places < num_listed, other=NO_KEY)
    else:
        z = _scaled(load_scores(row_ptr, places, vocab_size), peak, temperature)
        keys = pack(_falling_bits(z), places, vocab_size)
    return keys


@triton.jit
def _gumbel(words):
    """fp32 Gumbel noise of 32-bit words. The 24-bit u is exact in fp32 and never 0 or 1."""
    u = ((words >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(u))


@triton.jit
def _words_of_span(first, seed, position, BLOCK_N: tl.constexpr):
    """The words of token ids first .. first + BLOCK_N - 1, four to a Philox block; ``first`` is a multiple of four."""
    blocks = first // 4 + tl.arange(0, BLOCK_N // 4)
    zero = blocks * 0
    a, b, c, d = tl.philox(seed, blocks, zero + position, zero, zero)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK_N,))


@triton.jit
def _words_of_ids(ids, seed, position):
    """The words of any token ids."""
    zero = ids * 0
    a, b, c, d = tl.philox(seed, ids >> 2, zero + position, zero, zero)
    lane = ids & 3
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
