"""Sampling and log-probabilities in plain torch. Only rows that need an order are ordered, and only as far as they need it.

The canonical order (largest first, ties by ascending id) comes from one int64 key per token, so no two keys are equal and
topk is exact. The noise is Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

from typing import NamedTuple

import torch

from rapid_llm.kernels.ops.sampling.inputs import check_adjust_logits, check_sample, check_top_logprobs
from rapid_llm.kernels.ops.sampling.mask_inputs import check_mask_logits

_CHUNK_ELEMENTS = 1 << 22  # logits that are sampled at a time: the noise takes some ten int64 temporaries
_LARGEST_TOPK = 4096  # rows with more candidates are sorted
_NUCLEUS = 1024  # tokens looked at first where only top_p bounds a row

_GROUP = 64  # neighbouring ids whose masses are drawn from together
_DRAWS = 4  # of a row without top_k, before it is cut

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


class _Rules(NamedTuple):
    """What shapes some rows' draws, every field [rows, 1]."""

    temperature: torch.Tensor  # fp32, > 0
    top_k: torch.Tensor  # int64; the vocabulary size where off
    top_p: torch.Tensor  # fp64; inf where off
    min_p: torch.Tensor  # fp64
    seeds: torch.Tensor  # int64
    positions: torch.Tensor  # int64

    def of(self, rows: torch.Tensor) -> "_Rules":
        """The rules of ``rows``."""
        return _Rules(*(field.index_select(0, rows) for field in self))


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
        logits: [num_seqs, vocab_size], fp32 | bf16 | fp16; inner stride 1, row stride free.
        temperature, top_p, min_p: [num_seqs], fp32; top_p >= 1 and min_p 0 are off; stride 1.
        top_k: [num_seqs], int32; <= 0 or >= vocab_size is off; stride 1.
        seeds: [num_seqs], int64; stride 1.
        positions: [num_seqs], int32; position of the token being drawn; stride 1.
        out_ids: [num_seqs], int32; stride 1.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/sampling.py::sample. Origin: this repo; Gumbel-max trick and Philox as published.
    """
    check_sample(logits, temperature, top_k, top_p, min_p, seeds, positions, out_ids)
    if not logits.shape[0]:
        return out_ids

    peaks, greedy = logits.max(dim=1)  # the first of equal maxima; NaN where the row has one
    sound = peaks > float("-inf")
    out_ids.copy_(torch.where(sound, greedy, -1))
    drawn = (sound & (temperature > 0)).nonzero().view(-1)
    if not drawn.shape[0]:
        return out_ids
    for rows in torch.split(drawn, max(1, _CHUNK_ELEMENTS // logits.shape[1])):
        k = top_k.index_select(0, rows).long()
        p = top_p.index_select(0, rows).double()
        rules = _Rules(
            temperature=temperature.index_select(0, rows)[:, None],
            top_k=torch.where(k > 0, k, logits.shape[1]).clamp_(max=logits.shape[1])[:, None],
            top_p=torch.where(p < 1, p, float("inf"))[:, None],
            min_p=min_p.index_select(0, rows).double()[:, None],
            seeds=seeds.index_select(0, rows)[:, None],
            positions=positions.index_select(0, rows).long()[:, None],
        )
        out_ids.index_copy_(0, rows, _draw(logits.index_select(0, rows), peaks.index_select(0, rows)[:, None], rules).int())
    return out_ids


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, out_ids: torch.Tensor, out_logprobs: torch.Tensor
) -> torch.Tensor:
    """Write ids and fp32 log-probabilities of the given token (column 0) and of the n largest, and return out_logprobs.

    Log-probabilities are those of the raw logits, +inf counting as the largest; columns 1.. stand in descending order, ties
    by ascending id. A token id of -1 gives (-1, nan) in column 0; a row with a NaN or nothing above -inf gives it everywhere.

    Args:
        logits: [num_seqs, vocab_size], fp32 | bf16 | fp16; inner stride 1, row stride free.
        token_ids: [num_seqs], int32, each -1 <= id < vocab_size; stride 1.
        out_ids: [num_seqs, n + 1], int32, 0 <= n <= vocab_size; inner stride 1, row stride free.
        out_logprobs: [num_seqs, n + 1], fp32; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/sampling.py::top_logprobs. Origin: this repo.
    """
    check_top_logprobs(logits, token_ids, out_ids, out_logprobs)
    if not logits.shape[0]:
        return out_logprobs

    scores = logits.float()
    peaks = scores.amax(dim=1, keepdim=True)
    sound = peaks > float("-inf")
    shifted = (scores - peaks).masked_fill_(scores == peaks, 0.0)
    logprobs = shifted - shifted.exp().sum(dim=1, keepdim=True).log_()
    ids = token_ids.long()[:, None]
    if out_ids.shape[1] > 1:
        keys = _canonical_keys(_descending_bits(scores))
        ids = torch.cat([ids, keys.topk(out_ids.shape[1] - 1, largest=False, sorted=True).values & _WORD], dim=1)
    known = sound & (ids >= 0)
    out_ids.copy_(torch.where(known, ids, -1))
    return out_logprobs.copy_(torch.where(known, logprobs.gather(1, ids.clamp(min=0)), float("nan")))


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
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/sampling.py::adjust_logits. Origin: this repo; repetition penalty as in Keskar et al. 2019
    (https://arxiv.org/abs/1909.05858), the other two as in OpenAI's API.
    """
    check_adjust_logits(logits, counts, count_rows, repetition, presence, frequency, edit_rows, edit_ids, edit_values, out)
    out.copy_(logits)
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])  # at a time; all of them, since a search for some would wait for the device
    for start in range(0, logits.shape[0] if counts.shape[0] else 0, rows):
        part = slice(start, start + rows)
        scores, named = out[part], count_rows[part]
        factor, once, each = (values[part, None] for values in (repetition, presence, frequency))
        held = counts.index_select(0, named.clamp(min=0)).masked_fill_(named[:, None] < 0, 0)
        scores.copy_(torch.where(held != 0, torch.where(scores > 0, scores / factor, scores * factor), scores))
        held &= (1 << 30) - 1
        scores.sub_(each * held).sub_(once * (held > 0))
    if edit_ids.shape[0]:
        out.index_put_((edit_rows, edit_ids), edit_values, accumulate=True)
    return out


def mask_logits(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write the logits into ``out``, -inf in place of those that a row's mask does not allow, and return it.

    Bit ``id % 32`` of word ``id // 32`` allows a token. A row whose ``mask_rows`` is -1 is copied. A NaN stays one.

    Args:
        logits: [num_seqs, vocab_size], fp32 | bf16 | fp16; inner stride 1, row stride free.
        masks: [num_masks, ceil(vocab_size / 32)], int32; inner stride 1, row stride free.
        mask_rows: [num_seqs], int32, -1 <= row < num_masks; stride 1.
        out: [num_seqs, vocab_size], fp32, no part of ``logits``; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/sampling.py::mask_logits. Origin: this repo; the layout of the mask is llguidance's
    (https://github.com/guidance-ai/llguidance).
    """
    check_mask_logits(logits, masks, mask_rows, out)
    out.copy_(logits)
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])  # at a time, as in adjust_logits
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    for start in range(0, logits.shape[0] if masks.shape[0] else 0, rows):
        scores, named = out[start : start + rows], mask_rows[start : start + rows]
        words = masks.index_select(0, named.clamp(min=0)).masked_fill_(named[:, None] < 0, -1)
        banned = (words[:, :, None] >> bits & 1).view(len(words), -1)[:, : scores.shape[1]] == 0
        scores.masked_fill_(banned & ~scores.isnan(), -torch.inf)
    return out


def _draw(logits: torch.Tensor, peaks: torch.Tensor, rules: _Rules) -> torch.Tensor:
    """Token ids [rows], int64, of sound rows with a temperature."""
    scores = logits.float()
    z = ((scores - peaks.float()) / rules.temperature).masked_fill_(scores == peaks, 0.0)  # exact 0 also where inf - inf
    ids = torch.full((z.shape[0],), -1, dtype=torch.int64, device=z.device)
    by_mass = (rules.top_k >= z.shape[1]).view(-1).nonzero().view(-1)
    if by_mass.shape[0]:
        ids.index_copy_(0, by_mass, _first_kept(z.index_select(0, by_mass), rules.of(by_mass)))
    rest = (ids < 0).nonzero().view(-1)
    if rest.shape[0]:
        ids.index_copy_(0, rest, _draw_in_order(z.index_select(0, rest), rules.of(rest)))
    return ids


def _first_kept(z: torch.Tensor, rules: _Rules) -> torch.Tensor:
    """The first of some draws from all tokens that top_p and min_p keep, -1 where they keep none."""
    masses = z.double().exp_()
    groups = torch.nn.functional.pad(masses, (0, -z.shape[1] % _GROUP)).view(len(z), -1, _GROUP).sum(dim=2).log_().float()
    ids, winners = torch.arange(z.shape[1], device=z.device), torch.full((len(z),), -1, dtype=torch.int64, device=z.device)
    for draw in range(_DRAWS):
        group = _noisiest(groups, 0, rules, 2 * draw + 1)
        tokens = group[:, None] * _GROUP + ids.new_tensor(range(_GROUP))
        inside = z.gather(1, tokens.clamp(max=z.shape[1] - 1)).masked_fill_(tokens >= z.shape[1], float("-inf"))
        place = _noisiest(inside, group[:, None] * (_GROUP // 4), rules, 2 * draw + 2)[:, None]
        token, score = tokens.gather(1, place), inside.gather(1, place)
        kept = (score == 0) | (score.double().exp_() >= rules.min_p)
        if bool((rules.top_p < 1).any()):
            before = (z > score) | ((z == score) & (ids < token))
            kept &= masses.masked_fill(~before, 0.0).sum(dim=1, keepdim=True) < rules.top_p * masses.sum(dim=1, keepdim=True)
        winners = torch.where((winners < 0) & kept.view(-1), token.view(-1), winners)
        if bool((winners >= 0).all()):
            break
    return winners


def _noisiest(scores: torch.Tensor, first_block: torch.Tensor | int, rules: _Rules, stream: int) -> torch.Tensor:
    """Where the largest of ``scores`` [rows, n] plus noise is; of ids from the first of block ``first_block`` on."""
    blocks = first_block + torch.arange(-(-scores.shape[1] // 4), device=scores.device)[None]
    noise = _gumbel(_noise_words(blocks, rules, stream)).flatten(1)[:, : scores.shape[1]]
    return (scores + noise).max(dim=1).indices


def _draw_in_order(z: torch.Tensor, rules: _Rules) -> torch.Tensor:
    """Winners by noise of each token: a short prefix of the order first, the whole of it where that is not enough."""
    short = torch.where(rules.top_k <= _LARGEST_TOPK, rules.top_k, _NUCLEUS)
    ids, settled = _draw_from_prefix(z, rules, min(int(short.max()), z.shape[1]))
    if not bool(settled.all()):
        rest = (~settled).nonzero().view(-1)
        ids.index_copy_(0, rest, _draw_from_prefix(z.index_select(0, rest), rules.of(rest), z.shape[1])[0])
    return ids


def _draw_from_prefix(z: torch.Tensor, rules: _Rules, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Winners among the first ``width`` tokens of the order, and whether these are all that a row can choose from."""
    keys = _canonical_keys(z.abs().view(torch.int32).long())  # z <= 0: the larger |z|, the later
    keys = keys.sort(dim=1).values if width == z.shape[1] else keys.topk(width, largest=False, sorted=True).values
    ids = keys & _WORD
    ranked = -(keys >> 32).int().view(torch.float32)
    rank = torch.arange(width, device=z.device)

    mass = ranked.double().exp_().masked_fill_(rank >= rules.top_k, 0.0)
    reached = mass.cumsum(dim=1)
    bounded = rules.top_k <= width
    total = reached[:, -1:]
    if not bool(bounded.all()):  # the mass of the whole vocabulary is only then worth its exp
        total = torch.where(bounded, total, z.double().exp_().sum(dim=1, keepdim=True))
    kept = (reached - mass < rules.top_p * total) & (mass >= rules.min_p) & (rank < rules.top_k)
    kept[:, 0] = True

    noisy = ranked + _gumbel(_noise_words(ids >> 2, rules).gather(2, (ids & 3)[:, :, None])[:, :, 0])
    noisy.masked_fill_(~kept, float("-inf"))
    winners = torch.where(noisy == noisy.amax(dim=1, keepdim=True), ids, _WORD).amin(dim=1)
    nucleus_inside = (rules.top_k == z.shape[1]) & (reached[:, -1:] >= rules.top_p * total)
    return winners, (bounded | nucleus_inside).view(-1)


def _canonical_keys(bits: torch.Tensor) -> torch.Tensor:
    """Unique keys that ascend in the canonical order: ``bits`` [rows, vocab], overwritten, above; the token id below."""
    return bits.bitwise_left_shift_(32).bitwise_or_(torch.arange(bits.shape[1], device=bits.device))


def _descending_bits(scores: torch.Tensor) -> torch.Tensor:
    """int64 values in int32's range that rise as the fp32 ``scores`` fall; -0.0 and 0.0 are equal."""
    bits = (scores + 0.0).view(torch.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats: the larger the bits, the smaller the number
    return (~rising).long()


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    """fp32 Gumbel noise of 32-bit words held in int64. The 24-bit u is exact in fp32 and never 0 or 1."""
    u = ((words >> 9).float() + 0.5) * 2.0**-23
    return u.log_().neg_().log_().neg_()


def _noise_words(blocks: torch.Tensor, rules: _Rules, stream: int = 0) -> torch.Tensor:
    """The four words of every block of four ids in one of a position's streams: [rows, blocks, 4] int64, 0 <= word < 2**32."""
    zero = torch.zeros_like(rules.positions)
    counter = (blocks, rules.positions & _WORD, zero + stream, zero)
    return torch.stack(philox(counter, (rules.seeds & _WORD, (rules.seeds >> 32) & _WORD)), dim=-1)


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox-4x32-10 on 32-bit words held in int64, broadcast against each other.

    A product wraps at 64 bits, which leaves both halves right; the shift carries the sign, which the mask takes off again.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> 32 & _WORD) ^ c1 ^ k0, right & _WORD, (left >> 32 & _WORD) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3
