"""One token id per row of logits: temperature, top-k, top-p, min-p, and noise that depends on seed, position and id only.

Memory-bound while rows are wide: a row is read once, and once more where top-p bounds it and top-k does not. Four launches, none
of which waits for the host:

1. one program per (row, split): of each group of 64 ids the largest logit and the mass of the group beside it;
2. one program per (row, draw): a draw from the whole row, of a group by its mass and of one of its tokens. A greedy row has its
   token here, and a row with top-k its likeliest tokens as a list: groups whose largest logit is not among the k largest of all
   groups hold none of the k;
3. one program per (row, split) of a row that top-p alone bounds: the mass in front of each of its draws;
4. one program per row: the first draw that is kept; or the winner among a list, or a whole row, that was cut: the last key of the
   prefix that top-k and top-p keep, found by bisection.

That a draw from all tokens, thrown away unless it is kept, is one from the kept tokens is rejection sampling, as in FlashInfer
(Ye et al. 2025, arXiv:2501.01005), where it replaces the sort. Masses are fixed-point integers, whose sums do not depend on their
order: a row gives the same id however it is split and whatever stands beside it. Noise is Philox-4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"); to take the largest of logarithms of masses with Gumbel noise is to draw by them.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs
from rapid_llm.kernels.ops.sampling.inputs import check_sample
from rapid_llm.kernels.ops.sampling.logits import (
    MAX_VOCAB,
    NO_KEY,
    bits_of,
    ids_of,
    load_scores,
    pack,
)
from rapid_llm.kernels.ops.tile_policy import resolve_tiles

_GROUP = tl.constexpr(64)  # neighbouring ids whose masses are drawn from together
_DRAWS = tl.constexpr(4)  # of a row without top_k, before it is cut
_LISTED = tl.constexpr(2048)  # the likeliest tokens of a row with top_k that fit its list
_NO_GROUP = tl.constexpr(MAX_VOCAB // 64)  # the first that no vocabulary has
_LIST_WARPS = 8  # whose registers a list of keys takes
_GROUPS_AT_ONCE = tl.constexpr(16)  # that are looked through for them
_MASS_ONE = tl.constexpr(float(1 << 42))  # the mass of the likeliest token; 2**20 of them stay below 2**63
_GROUP_MASS_ONE = tl.constexpr(float(1 << 24))  # that of the likeliest token of a group in its group's sum
_LAST_KEY = tl.constexpr((0x7F800000 << 20) + (1 << 20) - 1)  # of z = -inf and the largest id
# One value of each is read a row, so that nothing is gained by knowing where they begin: rows of a table do so anywhere.
_BY_ROW = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr"]


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
    What is kept is drawn from by its masses, exp(z). A row without top_k takes the first of four draws from all its tokens that
    is kept, each of a group of 64 ids by the groups' masses and of one of its tokens; other rows, and such as these four
    missed, take the kept token with the largest z + noise. Noise depends on seed, position and id or group only, so that a
    token hangs on neither its row nor its batch; the lowest id wins among equals.
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

    device = launch_device(logits)
    tile = resolve_tiles("sample", device=device, dtype=logits.dtype, num_seqs=num_seqs, vocab_size=vocab_size).launch()
    num_splits = triton.cdiv(vocab_size, tile["BLOCK_N"])
    num_groups = num_splits * (tile["BLOCK_N"] // _GROUP.value)
    draws, listed = _DRAWS.value, _LISTED.value
    maxima = logits.new_empty((num_seqs, num_groups), dtype=torch.float32)
    sums = logits.new_empty((num_seqs, num_groups), dtype=torch.int32)
    peaks, scores = logits.new_empty((num_seqs,), dtype=torch.float32), logits.new_empty((num_seqs, draws), dtype=torch.float32)
    ids, counts = logits.new_empty((num_seqs, draws), dtype=torch.int32), logits.new_empty((num_seqs,), dtype=torch.int32)
    likely_groups = logits.new_empty((num_seqs, num_groups), dtype=torch.int32)
    keys = logits.new_empty((num_seqs, listed), dtype=torch.int64)
    masses = logits.new_empty((num_seqs, num_splits, draws + 1), dtype=torch.int64)
    stride = logits.stride(0)
    groups, splits = max(triton.next_power_of_2(num_groups), 16), triton.next_power_of_2(num_splits)
    pdl = dependent_launch(device)
    wide = {"num_warps": min(max(groups // 256, 1), 8), "num_stages": 1}

    _group_kernel[(num_seqs * num_splits,)](logits, temperature, top_k, maxima, sums, stride, vocab_size, **tile, **pdl)
    _draw_kernel[(num_seqs * draws,)](
        logits, temperature, top_k, top_p, min_p, seeds, positions, maxima, sums, peaks, ids, scores, likely_groups, keys, counts,
        stride, vocab_size, num_groups, GROUPS=groups, **wide, **pdl,
    )  # fmt: skip
    _mass_kernel[(num_seqs * num_splits,)](
        logits, temperature, top_k, top_p, peaks, ids, scores, masses, stride, vocab_size, **tile, **pdl
    )
    _pick_kernel[(num_seqs,)](
        logits, temperature, top_k, top_p, min_p, seeds, positions, peaks, ids, masses, keys, counts, out_ids,
        stride, vocab_size, SPLITS=splits, **{**tile, "num_warps": max(tile["num_warps"], _LIST_WARPS)}, **pdl,
    )  # fmt: skip
    return out_ids


@triton.jit
def _group_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    maxima_ptr,
    sums_ptr,
    logits_stride,
    vocab_size,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    GROUPS: tl.constexpr = BLOCK_N // _GROUP
    num_splits = tl.cdiv(vocab_size, BLOCK_N)  # rows and splits both on axis 0: the others stop at 65,535
    program = tl.program_id(0)
    row = (program // num_splits).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    cols = program % num_splits * BLOCK_N + groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    scores = load_scores(logits_ptr + row * logits_stride, cols, vocab_size)  # [GROUPS, GROUP]
    largest = tl.max(scores, 1)
    broken = tl.max((scores != scores).to(tl.int32), 1)  # a maximum passes over NaN

    places = program.to(tl.int64) * GROUPS + groups
    tl.store(maxima_ptr + places, tl.where(broken > 0, float("nan"), largest))
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0) & (_is_off(tl.load(top_k_ptr + row), vocab_size)):
        below = tl.where(scores == largest[:, None], 0.0, (scores - largest[:, None]) * (1.0 / temperature))
        tl.store(sums_ptr + places, tl.sum((tl.exp(below) * _GROUP_MASS_ONE).to(tl.int32), 1))


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    maxima_ptr,
    sums_ptr,
    peaks_ptr,
    ids_ptr,
    scores_ptr,
    likely_groups_ptr,
    keys_ptr,
    counts_ptr,
    logits_stride,
    vocab_size,
    num_groups,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = (tl.program_id(0) // _DRAWS).to(tl.int64)
    draw = tl.program_id(0) % _DRAWS
    temperature, top_k, min_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(min_p_ptr + row)
    row_ptr = logits_ptr + row * logits_stride
    is_drawn = (temperature > 0) & _is_off(top_k, vocab_size)
    if (draw == 0) | (is_drawn & ((tl.load(top_p_ptr + row) < 1) | (min_p > 0))):
        groups = tl.arange(0, GROUPS)
        maxima = tl.load(maxima_ptr + row * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
        broken = tl.max((maxima != maxima).to(tl.int32), 0)
        peak = tl.where(broken > 0, float("nan"), tl.max(maxima, 0))
        if draw == 0:
            tl.store(peaks_ptr + row, peak)
        if peak > float("-inf"):
            tokens = tl.arange(0, _GROUP)
            if is_drawn:
                seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
                sums = tl.load(sums_ptr + row * num_groups + groups, mask=groups < num_groups, other=0)
                masses = _scaled(maxima, peak, temperature) + tl.log(sums.to(tl.float32))
                group = _first_largest(masses + _gumbel(_words_of_span(0, seed, position, 2 * draw + 1, GROUPS)), groups)
                first = group * _GROUP
                z = _scaled(load_scores(row_ptr, first + tokens, vocab_size), peak, temperature)
                noisy = z + _gumbel(_words_of_span(first, seed, position, 2 * draw + 2, _GROUP))
                token = _first_largest(noisy, first + tokens)
                score = tl.max(tl.where(first + tokens == token, z, float("-inf")), 0)
                tl.store(ids_ptr + row * _DRAWS + draw, tl.where(_is_likely(score, min_p), token, -1))
                tl.store(scores_ptr + row * _DRAWS + draw, score)
            elif temperature > 0:
                bits = _falling_bits(_scaled(maxima, peak, temperature))
                limit = _kth_smallest(bits, top_k)
                _list_tokens(
                    row_ptr, likely_groups_ptr + row * num_groups, keys_ptr + row * _LISTED, counts_ptr + row,
                    (bits <= limit) & (groups < num_groups), groups, limit, peak, temperature, vocab_size,
                )  # fmt: skip
            else:
                first = tl.min(tl.where(maxima == peak, groups, GROUPS), 0) * _GROUP
                token = _first_largest(load_scores(row_ptr, first + tokens, vocab_size), first + tokens)
                tl.store(ids_ptr + row * _DRAWS, token)


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)
def _mass_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    peaks_ptr,
    ids_ptr,
    scores_ptr,
    masses_ptr,
    logits_stride,
    vocab_size,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    num_splits = tl.cdiv(vocab_size, BLOCK_N)
    program = tl.program_id(0)
    row = (program // num_splits).to(tl.int64)
    temperature, peak = tl.load(temperature_ptr + row), tl.load(peaks_ptr + row)
    is_bounded = (tl.load(top_p_ptr + row) < 1) & _is_off(tl.load(top_k_ptr + row), vocab_size)
    if (temperature > 0) & is_bounded & (peak > float("-inf")):
        cols = program % num_splits * BLOCK_N + tl.arange(0, BLOCK_N)
        z = _scaled(load_scores(logits_ptr + row * logits_stride, cols, vocab_size), peak, temperature)
        mass = tl.where(cols < vocab_size, _mass(z), 0)
        own_ptr = masses_ptr + program.to(tl.int64) * (_DRAWS + 1)
        tl.store(own_ptr, tl.sum(mass, 0))
        largest = tl.max(tl.where(cols < vocab_size, z, float("-inf")), 0)
        for draw in tl.static_range(_DRAWS):
            token, score = tl.load(ids_ptr + row * _DRAWS + draw), tl.load(scores_ptr + row * _DRAWS + draw)
            before = tl.full([], 0, tl.int64)
            if largest >= score:  # most splits hold nothing as likely as what is drawn
                is_before = (z > score) | ((z == score) & (cols < token))
                before = tl.sum(tl.where(is_before, mass, 0), 0)
            tl.store(own_ptr + 1 + draw, before)


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
    ids_ptr,
    masses_ptr,
    keys_ptr,
    counts_ptr,
    out_ids_ptr,
    logits_stride,
    vocab_size,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    num_splits = tl.cdiv(vocab_size, BLOCK_N)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p, peak = tl.load(min_p_ptr + row), tl.load(peaks_ptr + row)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    row_ptr, list_ptr = logits_ptr + row * logits_stride, keys_ptr + row * _LISTED

    winner = tl.full([], -1, tl.int32)
    if peak > float("-inf"):
        if temperature > 0:
            is_off = _is_off(top_k, vocab_size)
            if is_off:
                splits = tl.arange(0, SPLITS)
                own_ptr = masses_ptr + row * num_splits * (_DRAWS + 1) + splits * (_DRAWS + 1)
                is_bounded = top_p < 1
                summed = splits < tl.where(is_bounded, num_splits, 0)  # elsewhere nothing is there to be read
                wanted = _target(top_p, tl.sum(tl.load(own_ptr, mask=summed, other=0), 0))
                num_draws = tl.where(is_bounded | (min_p > 0), _DRAWS, 1)
                for draw in tl.static_range(_DRAWS):
                    before = tl.sum(tl.load(own_ptr + 1 + draw, mask=summed, other=0), 0)
                    token = tl.load(ids_ptr + row * _DRAWS + draw, mask=draw < num_draws, other=-1)
                    is_first_kept = (winner < 0) & ((before < wanted) | (top_p >= 1))
                    winner = tl.where(is_first_kept, token, winner)
            if winner < 0:
                # Each way once: what is inlined here is most of what compiling the four kernels takes.
                listed = tl.load(counts_ptr + row, mask=is_off == 0, other=_LISTED + 1)
                if listed <= _LISTED:
                    winner = _draw_from_prefix(
                        row_ptr, list_ptr, top_k, top_p, min_p, peak, temperature, seed, position, listed, True, _LISTED
                    )
                else:
                    k = tl.where(is_off, vocab_size, top_k)
                    winner = _draw_from_prefix(
                        row_ptr, list_ptr, k, top_p, min_p, peak, temperature, seed, position, vocab_size, False, BLOCK_N
                    )
        else:
            winner = tl.load(ids_ptr + row * _DRAWS)
    tl.store(out_ids_ptr + row, winner)


@triton.jit
def _is_off(top_k, vocab_size):
    """Whether top_k keeps every token."""
    return (top_k <= 0) | (top_k >= vocab_size)


@triton.jit
def _first_largest(values, ids):
    """The lowest id among those of the largest value."""
    return tl.min(tl.where(values == tl.max(values, 0), ids, 0x7FFFFFFF), 0)


@triton.jit
def _scaled(scores, peak, temperature):
    """z of scores, at most 0: correctly rounded, as its ties count; exactly 0 at the peak, which +inf may be."""
    return tl.where(scores == peak, 0.0, tl.div_rn(scores - peak, temperature))


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
def _kth_smallest(bits, k):
    """The k-th smallest of some int32 >= 0 that k of them at most stand before; the largest of them where k is more."""
    low, high = tl.min(bits, 0) - 1, tl.max(bits, 0)
    count = tl.full([], -1, tl.int32)
    while (high - low > 1) & (count != k):
        middle = low + (high - low) // 2
        count = tl.sum((bits <= middle).to(tl.int32), 0)
        low, high = tl.where(count >= k, low, middle), tl.where(count >= k, middle, high)
    return high


@triton.jit
def _list_tokens(row_ptr, likely_groups_ptr, keys_ptr, count_ptr, is_likely, groups, limit, peak, temperature, vocab_size):
    """Keys of all tokens whose bits are at most ``limit``, from the groups that hold any; how many there are, fitting or not."""
    places = tl.cumsum(is_likely.to(tl.int32), 0) - 1
    tl.store(likely_groups_ptr + places, groups, mask=is_likely)
    tl.debug_barrier()  # other threads read what these have stored
    num_likely = tl.sum(is_likely.to(tl.int32), 0)
    count = tl.full([], 0, tl.int32)
    at_once = tl.arange(0, _GROUPS_AT_ONCE)
    for start in range(0, num_likely, _GROUPS_AT_ONCE):
        group = tl.load(likely_groups_ptr + start + at_once, mask=start + at_once < num_likely, other=_NO_GROUP)
        cols = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]  # [AT_ONCE, GROUP]
        bits = _falling_bits(_scaled(load_scores(row_ptr, cols, vocab_size), peak, temperature))
        listed = (bits <= limit) & (cols < vocab_size)
        of_group = tl.sum(listed.to(tl.int32), 1)
        first = count + tl.cumsum(of_group, 0) - of_group
        place = first[:, None] + tl.cumsum(listed.to(tl.int32), 1) - 1
        tl.store(keys_ptr + place, pack(bits, cols, vocab_size), mask=listed & (place < _LISTED))
        count += tl.sum(of_group, 0)
    tl.store(count_ptr, count)


@triton.jit
def _draw_from_prefix(
    row_ptr,
    list_ptr,
    k,
    top_p,
    min_p,
    peak,
    temperature,
    seed,
    position,
    length,
    FROM_LIST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The winner by noise of each token among the first ``k`` that top_p and min_p keep, of a list of ``length`` keys or of a
    row of as many tokens."""
    everything = tl.full([], _LAST_KEY, tl.int64)
    count, mass, cut, _ = _reach(everything, row_ptr, list_ptr, peak, temperature, length, FROM_LIST, BLOCK_N)
    for rule in range(2):  # top_k, then top_p
        is_top_k = rule == 0
        if tl.where(is_top_k, k < count, top_p < 1):
            wanted_count = tl.where(is_top_k, k, count + 1)
            wanted_mass = tl.where(is_top_k, NO_KEY, _target(top_p, mass))
            cut, count, mass = _cut_of_prefix(
                wanted_count, wanted_mass, cut, count, mass, row_ptr, list_ptr, peak, temperature, length, FROM_LIST, BLOCK_N
            )

    best, winner = tl.full([], float("-inf"), tl.float32), tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(0, length, BLOCK_N):
        keys = _keys_at(start, row_ptr, list_ptr, peak, temperature, length, FROM_LIST, BLOCK_N)
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
    row_ptr,
    list_ptr,
    peak,
    temperature,
    length,
    FROM_LIST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The cut of the shortest prefix with that many tokens or that mass, its count and mass.

    ``cut``, ``count`` and ``mass`` are those of a prefix that reaches it. The bisection goes on while more than one key stands
    between its ends, which move on to keys, so that neither gaps between keys nor ties cost steps.
    """
    low, below = tl.full([], -1, tl.int64), tl.full([], 0, tl.int32)
    while (count - below > 1) & (count != wanted_count):
        middle = low + (cut - low) // 2
        reached, reached_mass, last, following = _reach(middle, row_ptr, list_ptr, peak, temperature, length, FROM_LIST, BLOCK_N)
        enough = (reached >= wanted_count) | (reached_mass >= wanted_mass)
        low, below = tl.where(enough, low, following - 1), tl.where(enough, below, reached)
        cut, count, mass = tl.where(enough, last, cut), tl.where(enough, reached, count), tl.where(enough, reached_mass, mass)
    return cut, count, mass


@triton.jit
def _reach(limit, row_ptr, list_ptr, peak, temperature, length, FROM_LIST: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many keys stand up to ``limit``, their mass, the last of them, and the first behind it."""
    count, mass = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    last, following = tl.full([], -1, tl.int64), tl.full([], NO_KEY, tl.int64)
    for start in range(0, length, BLOCK_N):
        keys = _keys_at(start, row_ptr, list_ptr, peak, temperature, length, FROM_LIST, BLOCK_N)
        inside = keys <= limit
        count += tl.sum(inside.to(tl.int32), 0)
        mass += tl.sum(tl.where(inside, _mass(_z_of(keys)), 0), 0)
        last = tl.maximum(last, tl.max(tl.where(inside, keys, -1), 0))
        following = tl.minimum(following, tl.min(tl.where(inside, NO_KEY, keys), 0))
    return count, mass, last, following


@triton.jit
def _keys_at(start, row_ptr, list_ptr, peak, temperature, length, FROM_LIST: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of keys [N], read from the list of the row or made from its logits."""
    places = start + tl.arange(0, BLOCK_N)
    if FROM_LIST:
        return tl.load(list_ptr + places, mask=places < length, other=NO_KEY)
    z = _scaled(load_scores(row_ptr, places, length), peak, temperature)
    return pack(_falling_bits(z), places, length)


@triton.jit
def _gumbel(words):
    """fp32 Gumbel noise of 32-bit words. The 24-bit u is exact in fp32 and never 0 or 1."""
    u = ((words >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(u))


@triton.jit
def _words_of_span(first, seed, position, stream, BLOCK_N: tl.constexpr):
    """The words of ids first .. first + BLOCK_N - 1 in a stream, four to a Philox block; ``first`` is a multiple of four."""
    blocks = first // 4 + tl.arange(0, BLOCK_N // 4)
    zero = blocks * 0
    a, b, c, d = tl.philox(seed, blocks, zero + position, zero + stream, zero)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK_N,))


@triton.jit
def _words_of_ids(ids, seed, position):
    """The words of any token ids in stream 0."""
    zero = ids * 0
    a, b, c, d = tl.philox(seed, ids >> 2, zero + position, zero, zero)
    lane = ids & 3
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
