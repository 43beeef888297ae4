"""Log-probs of prompt tokens, from the logits of the tokens before them, as a step brings them: never those of a whole prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from rapid_llm.config import ResolvedConfig
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.transfers import to_pinned
from rapid_llm.step import SampledToken, SlotSetup, StepPlan

_ROWS = 32  # scored at a time: plain torch takes some six temporaries of their size


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """Log-probs that are on the device.

    Attributes:
        targets: slot, id and number of log-probs asked for, of each row.
        ids, logprobs: [rows, n + 1] for the largest n asked for.
        sampled_rows: rows of the step's logits that are sampled from; the others are these.
    """

    targets: tuple[tuple[int, int, int], ...]
    ids: torch.Tensor
    logprobs: torch.Tensor
    sampled_rows: list[int]

    def to_host(self) -> "ScoredPrompts":
        """A copy whose tensors are on their way to pinned host memory."""
        return replace(self, ids=to_pinned(self.ids), logprobs=to_pinned(self.logprobs))

    def tokens(self) -> dict[int, tuple[SampledToken, ...]]:
        """Each slot's scored tokens, in the order of the prompt."""
        rows = zip(self.targets, self.ids.tolist(), self.logprobs.tolist(), strict=True)
        return {
            slot: tuple(SampledToken(token, tuple(ids[: n + 1]), tuple(values[: n + 1])) for (_, token, n), ids, values in its)
            for slot, its in groupby(rows, key=lambda row: row[0][0])
        }


class PromptScorer:
    """Remembers how many log-probs each slot asked for."""

    def __init__(self, config: ResolvedConfig, place: Placement, vocab_size: int) -> None:
        self._num_logprobs = [-1] * config.max_num_seqs
        self._top_logprobs = place.kernel("top_logprobs", vocab_size=vocab_size)

    def setup(self, setups: Sequence[SlotSetup]) -> None:
        """Take over what sequences that got a slot ask for."""
        for setup in setups:
            self._num_logprobs[setup.slot] = setup.prompt_logprobs

    def __call__(self, logits: torch.Tensor, plan: StepPlan) -> ScoredPrompts:
        """Score the targets of ``plan``, which has some; ``logits`` [S, vocab_size] are those of all its wanted rows."""
        targets: list[tuple[int, int, int]] = []
        scored: list[int] = []
        sampled: list[int] = []
        for chunk in plan.chunks:
            targets += [(chunk.slot, token, self._num_logprobs[chunk.slot]) for token in chunk.targets]
            place = len(scored) + len(sampled)
            scored += range(place, place + len(chunk.targets))
            sampled += [place + len(chunk.targets)] if chunk.samples else []
        shape = (len(targets), 1 + max(n for _, _, n in targets))
        ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
        values = torch.empty(shape, dtype=torch.float32, device=logits.device)
        token_ids = torch.tensor([token for _, token, _ in targets], dtype=torch.int32, device=logits.device)
        for start in range(0, len(targets), _ROWS):
            rows = slice(start, start + _ROWS)
            self._top_logprobs(logits[scored[rows]], token_ids[rows], out_ids=ids[rows], out_logprobs=values[rows])
        return ScoredPrompts(tuple(targets), ids, values, sampled)
