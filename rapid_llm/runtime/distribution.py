"""The distribution that a token was drawn from, as scores: what top_logprobs needs to report it rather than the model's own."""

import torch


def drawn_scores(
    logits: torch.Tensor,
    drawn: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """fp32 scores [S, vocab_size] whose softmax is what the op ``sample`` draws from: -inf where its rules drop a token.

    The token that was drawn is always kept; at temperature 0 it is the only one.

    Args:
        logits: [S, vocab_size], adjusted.
        drawn: [S] int32, the ids that sample gave; a negative one leaves its row without meaning.
        temperature, top_k, top_p, min_p: [S], as sample takes them.
    """
    scores, vocab_size = logits.float(), logits.shape[1]
    peaks = scores.amax(dim=1, keepdim=True)
    z = (scores - peaks) / torch.where(temperature > 0, temperature, 1.0)[:, None]
    z.masked_fill_(scores == peaks, 0.0)  # exact 0 also where inf - inf

    ranked, order = z.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=z.device)
    most = torch.where((top_k > 0) & (temperature > 0), top_k, vocab_size)[:, None]
    mass = ranked.double().exp_().masked_fill_(rank >= most, 0.0)
    reached = mass.cumsum(dim=1)
    share = torch.where(top_p < 1, top_p.double(), torch.inf)[:, None]
    kept = (reached - mass < share * reached[:, -1:]) & (mass >= min_p.double()[:, None]) & (rank < most)
    kept &= (temperature > 0)[:, None]

    result = torch.full_like(z, -torch.inf).scatter_(1, order, ranked.masked_fill(~kept, -torch.inf))
    chosen = drawn.clamp(min=0).long()[:, None]
    return result.scatter_(1, chosen, z.gather(1, chosen))
