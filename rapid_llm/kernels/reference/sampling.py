"""Sampling and log-probabilities, one row at a time. Scores are fp32 as the op defines them; what follows is float64."""

import math

import torch

_MASK32 = (1 << 32) - 1
GROUP, DRAWS = 64, 4
"""Neighbouring ids whose masses are drawn from together, and how many draws a row without top_k has before it is cut."""


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token id per row, int64 [B]; -1 for a row with a NaN or with nothing above -inf."""
    ids = []
    for row, scores in enumerate(logits.float().cpu()):
        if not _is_sound(scores):
            ids.append(-1)
        elif temperature[row] <= 0:
            ids.append(scores.tolist().index(float(scores.max())))
        else:
            z = _scaled(scores, temperature[row].cpu())
            kept = _kept(z, int(top_k[row]), float(top_p[row]), float(min_p[row]))
            draws = 0 if 0 < int(top_k[row]) < len(z) else DRAWS
            ids.append(_drawn(z.double(), kept, draws, int(seeds[row]), int(positions[row])))
    return torch.tensor(ids, dtype=torch.int64)


def _drawn(z: torch.Tensor, kept: list[int], draws: int, seed: int, position: int) -> int:
    """The first of some draws from all tokens that is kept; a draw from what is kept where none is."""
    allowed = set(kept)
    for draw in range(draws):
        token = _drawn_from_all(z, draw, seed, position)
        if token in allowed:
            return token
    noisy: list[float] = (z + gumbel_noise(seed, position, 0, 0, len(z))).tolist()
    return min((-noisy[token], token) for token in kept)[1]


def _drawn_from_all(z: torch.Tensor, draw: int, seed: int, position: int) -> int:
    """A group by the logarithms of the groups' masses, then one of its tokens."""
    padded = torch.nn.functional.pad(z, (0, -len(z) % GROUP), value=-math.inf)
    masses = torch.logsumexp(padded.view(-1, GROUP), dim=1)
    group = int((masses + gumbel_noise(seed, position, 2 * draw + 1, 0, len(masses))).argmax())
    first = group * GROUP
    return first + int((padded[first : first + GROUP] + gumbel_noise(seed, position, 2 * draw + 2, first, GROUP)).argmax())


def filtered_probabilities(
    scores: torch.Tensor, temperature: torch.Tensor, *, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """The distribution that ``sample`` draws from, float64 [V], of one sound row [V] at a positive fp32 temperature."""
    z = _scaled(scores.float(), temperature)
    kept = _kept(z, top_k, top_p, min_p)
    probabilities = torch.zeros(len(z), dtype=torch.float64)
    probabilities[kept] = torch.exp(z[kept].double())
    return probabilities / probabilities.sum()


def top_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, *, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, int64 [B, n + 1], and float64 log-probabilities [B, n + 1] of the given token and of the n largest."""
    ids, logprobs = [], []
    for row, token in zip(logits.float().cpu(), token_ids.tolist(), strict=True):
        if not _is_sound(row):
            ids.append([-1] * (n + 1))
            logprobs.append([math.nan] * (n + 1))
            continue
        largest = torch.sort(row, descending=True, stable=True).indices[:n].tolist()
        z = _scaled(row.double(), torch.tensor(1.0, dtype=torch.float64))
        row_logprobs = z - torch.log(torch.exp(z).sum())
        ids.append([token, *largest])
        logprobs.append([math.nan if i < 0 else float(row_logprobs[i]) for i in ids[-1]])
    shape = (len(ids), n + 1)
    return torch.tensor(ids, dtype=torch.int64).view(shape), torch.tensor(logprobs, dtype=torch.float64).view(shape)


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
) -> torch.Tensor:
    """Float64 logits [B, V], penalised by the row of counts that each names, then edited token by token."""
    rows: list[list[float]] = logits.double().tolist()
    for row, table_row in enumerate(count_rows.tolist()):
        if table_row < 0:
            continue
        held = counts[table_row].tolist()
        for token in (token for token, count in enumerate(held) if count):
            put_out = held[token] % (1 << 30)
            score = rows[row][token]
            score = score / float(repetition[row]) if score > 0 else score * float(repetition[row])
            rows[row][token] = score - float(frequency[row]) * put_out - (float(presence[row]) if put_out else 0.0)
    for row, token, value in zip(edit_rows.tolist(), edit_ids.tolist(), edit_values.tolist(), strict=True):
        rows[row][token] += value
    return torch.tensor(rows, dtype=torch.float64).view(logits.shape)


def mask_logits(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> torch.Tensor:
    """Float64 logits [B, V], -inf where the row of ``masks`` that each row names has no bit; NaN stays."""
    rows: list[list[float]] = logits.double().tolist()
    for row, mask_row in enumerate(mask_rows.tolist()):
        if mask_row >= 0:
            words = masks[mask_row].tolist()
            rows[row] = [
                score if score != score or words[token // 32] >> token % 32 & 1 else -math.inf
                for token, score in enumerate(rows[row])
            ]
    return torch.tensor(rows, dtype=torch.float64).view(logits.shape)


def _is_sound(scores: torch.Tensor) -> bool:
    """No NaN, and something above -inf."""
    return not bool(torch.isnan(scores).any()) and float(scores.max()) > -math.inf


def _scaled(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(scores - max) / temperature in the dtype of ``scores``; exactly 0 at the max, which +inf may be."""
    largest = scores.max()
    return torch.where(scores == largest, torch.zeros_like(scores), (scores - largest) / temperature)


def _kept(z: torch.Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Token ids that survive, by descending z, ties by ascending id."""
    order: list[int] = torch.sort(z, descending=True, stable=True).indices.tolist()
    if 0 < top_k < len(order):
        order = order[:top_k]
    masses = torch.exp(z[order].double()).tolist()
    if top_p < 1:
        total, reached, count = math.fsum(masses), 0.0, 0
        while count == 0 or (count < len(order) and reached < top_p * total):
            reached += masses[count]
            count += 1
        order = order[:count]
    return [token for token, mass in zip(order, masses, strict=False) if mass >= min_p]


def gumbel_noise(seed: int, position: int, stream: int, first: int, count: int) -> torch.Tensor:
    """Float64 noise of ids ``first``, a multiple of four, to first + count - 1, in one of a position's streams."""
    block = first // 4 + torch.arange((count + 3) // 4, dtype=torch.int64)
    constants = [torch.full_like(block, value) for value in (position & _MASK32, stream, 0)]
    words = philox4x32(torch.stack([block, *constants]), seed & _MASK32, (seed >> 32) & _MASK32)
    u = ((words // 512).double() + 0.5) / 8388608.0
    return -torch.log(-torch.log(u.T.flatten()[:count]))


def philox4x32(counters: torch.Tensor, key_low: int, key_high: int) -> torch.Tensor:
    """Philox-4x32-10 of int64 counters [4, N] with 32-bit values; words of the same shape."""
    a, b, c, d = counters
    for _ in range(10):
        high_a, low_a = _product(a, 0xD2511F53)
        high_c, low_c = _product(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ key_low, low_c, high_a ^ d ^ key_high, low_a
        key_low = (key_low + 0x9E3779B9) % (1 << 32)
        key_high = (key_high + 0xBB67AE85) % (1 << 32)
    return torch.stack([a, b, c, d])


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of x * factor by 16-bit limbs, which never pass 63 bits."""
    low_part = (x % 65536) * factor  # < 2**48
    high_part = (x // 65536) * factor  # < 2**48
    carried = high_part + low_part // 65536
    return carried // 65536, (carried % 65536) * 65536 + low_part % 65536
