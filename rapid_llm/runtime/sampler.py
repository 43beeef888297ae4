"""Logits -> ids: the sampling values of every slot live on the device, and so does the id that each slot sampled last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rapid_llm.config import ResolvedConfig
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.adjuster import Adjuster
from rapid_llm.runtime.distribution import drawn_scores
from rapid_llm.runtime.masks import Masks
from rapid_llm.runtime.transfers import to_pinned
from rapid_llm.step import ALL_BANNED, NO_NUMBER, SampledToken, SlotSetup


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What sampling left on the device.

    Attributes:
        slots: the slot of each row.
        ids: [S] int32.
        num_logprobs: what each row asked for; -1 is none at all.
        logprob_ids, logprobs: [S, n + 1] for the largest n that a row asked for; None when no row asked.
        adjusted: [S, vocab_size] what the ids were drawn from, on the device; None when that were the logits themselves.
        edited: slots some of whose tokens are banned.
    """

    slots: tuple[int, ...]
    ids: torch.Tensor
    num_logprobs: tuple[int, ...]
    logprob_ids: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    adjusted: torch.Tensor | None = None
    edited: frozenset[int] = frozenset()

    def to_host(self) -> "SampledStep":
        """A copy whose tensors are on their way to pinned host memory."""
        on_host = replace(self, ids=to_pinned(self.ids))
        if self.logprob_ids is None or self.logprobs is None:
            return on_host
        return replace(on_host, logprob_ids=to_pinned(self.logprob_ids), logprobs=to_pinned(self.logprobs))

    def tokens(self) -> dict[int, SampledToken]:
        """Each slot's token, with as many log-probs as the slot asked for."""
        ids = [token if token >= 0 else self._failure(row) for row, token in enumerate(self.ids.tolist())]
        if self.logprob_ids is None or self.logprobs is None:
            return {slot: SampledToken(token) for slot, token in zip(self.slots, ids, strict=True)}
        reports = zip(self.slots, ids, self.num_logprobs, self.logprob_ids.tolist(), self.logprobs.tolist(), strict=True)
        return {slot: SampledToken(token, tuple(top[: n + 1]), tuple(values[: n + 1])) for slot, token, n, top, values in reports}

    def _failure(self, row: int) -> int:
        """Why a row has no id: its sequence bans every token, unless the logits were damaged before."""
        if self.adjusted is None or self.slots[row] not in self.edited or bool(self.adjusted[row].isnan().any()):
            return NO_NUMBER
        return ALL_BANNED


class Sampler:
    """Adjustments, then greedy, temperature, top-k, top-p and min-p, per slot.

    Attributes:
        last_ids: [max_num_seqs + 1] int32, as it was given; the last is nobody's.
    """

    def __init__(self, config: ResolvedConfig, place: Placement, vocab_size: int, last_ids: torch.Tensor) -> None:
        slots, device = config.max_num_seqs, place.device
        self.last_ids = last_ids
        # In the order of the op's parameters; what SlotSetup names goes to the slot's row.
        self._table = torch.zeros((4, slots + 1), dtype=torch.int32, device=device)  # one gather for all
        self._seeds = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._values = {**_columns(self._table), "seed": self._seeds}
        self._num_logprobs = [-1] * slots
        self._reports_drawn = [False] * slots  # log-probs of the distribution drawn from, not of the model's own
        # The rows of one step and their values: a decode step's slots are most often those of the step before.
        self._gathered: tuple[tuple[int, ...], torch.Tensor, list[torch.Tensor]] | None = None
        self._row_by_row = config.deterministic
        self._vocab_size, self._dtype = vocab_size, place.dtype
        self._sample = place.kernel("sample", vocab_size=vocab_size)
        self._adjust = Adjuster(config, place, vocab_size)
        self._mask = Masks(place, vocab_size)
        self._top_logprobs = place.kernel("top_logprobs", vocab_size=vocab_size)

    def setup(self, setups: Sequence[SlotSetup]) -> None:
        """Take over the sampling values of sequences that got a slot."""
        if not setups:
            return
        self._gathered = None
        self._adjust.setup(setups)
        slots = torch.tensor([setup.slot for setup in setups], device=self.last_ids.device)
        for name, column in self._values.items():
            column[slots] = torch.tensor([getattr(setup, name) for setup in setups], dtype=column.dtype, device=column.device)
        for setup in setups:
            self._num_logprobs[setup.slot] = setup.logprobs
            self._reports_drawn[setup.slot] = setup.processed

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Sample one id a row, as if nobody had their logits adjusted. What it launches hangs on the number of rows alone.

        Args:
            logits: [S, vocab_size].
            slots: [S] int32, of each row, on the device; nobody's for padding.
            positions: [S] int32, as in ``__call__``.
        """
        rows = slots.long()
        return self._draw(logits, rows, self._values_of(rows), positions)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Make every launch once that a step of ``sizes`` rows may need beside ``draw``, for nobody's slot."""
        nobody = self.last_ids.shape[0] - 1
        for size in sizes:
            logits = torch.zeros((size, self._vocab_size), dtype=self._dtype, device=self.last_ids.device)
            adjusted = logits.float()
            rows = torch.full((size,), nobody, device=logits.device)
            ids = self._draw(adjusted, rows, self._values_of(rows), self.last_ids.new_zeros(size))
            for scores in (logits, adjusted):
                self._likeliest(scores, ids, 1)
            self._adjust.prepare(logits)
            for scores in (logits, adjusted):
                self._mask.prepare(scores)

    def __call__(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        drawn: torch.Tensor | None = None,
        masks: Mapping[int, bytes] | None = None,
    ) -> SampledStep:
        """Sample one id a row.

        Args:
            logits: [S, vocab_size].
            slots: the slot of each row.
            positions: the position that each sampled id will have; with the seed it decides the noise.
            drawn: what ``draw`` has given for these rows; drawn anew where logits are adjusted or masked.
            masks: by slot, what may be sampled, as in Chunk.
        """
        slots, masks = tuple(slots), masks or {}
        adjusted = self._adjust(logits, slots, positions)
        drawn_from = logits if adjusted is None else adjusted
        if masks:
            drawn_from = self._mask(drawn_from, slots, masks)
        ids = drawn
        if ids is None or drawn_from is not logits:
            where = torch.tensor(positions, dtype=torch.int32, device=logits.device)
            ids = self._draw(drawn_from, *self._gather(slots), where)
        sampled = SampledStep(slots, ids, tuple(self._num_logprobs[slot] for slot in slots))
        if adjusted is not None:
            self._adjust.note(slots, ids)
        if drawn_from is not logits:
            edited = frozenset(slot for slot in slots if slot in masks or self._adjust.edits(slot))
            sampled = replace(sampled, adjusted=drawn_from, edited=edited)
        return self._with_logprobs(logits, drawn_from, sampled)

    def _draw(
        self, logits: torch.Tensor, rows: torch.Tensor, values: list[torch.Tensor], positions: torch.Tensor
    ) -> torch.Tensor:
        ids = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        self._sample(logits, *values, positions, out_ids=ids)
        self.last_ids[rows] = ids
        return ids

    def _gather(self, slots: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The slots as a device index, and the sampling values of each."""
        if self._gathered is None or self._gathered[0] != slots:
            rows = torch.tensor(slots, device=self.last_ids.device)
            self._gathered = (slots, rows, self._values_of(rows))
        return self._gathered[1:]

    def _values_of(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Temperature, top_k, top_p, min_p and seed of each row."""
        return [*_columns(self._table.index_select(1, rows)).values(), self._seeds.index_select(0, rows)]

    def _with_logprobs(self, logits: torch.Tensor, drawn_from: torch.Tensor, sampled: SampledStep) -> SampledStep:
        most = max(sampled.num_logprobs)
        if most < 0:
            return sampled
        ids, logprobs = self._likeliest(logits, sampled.ids, most)
        processed = [row for row, slot in enumerate(sampled.slots) if self._reports_drawn[slot]]
        if processed:
            rows = torch.tensor(processed, device=logits.device)
            values = [column[rows] for column in self._gather(sampled.slots)[1]]
            scores = self._drawn_scores(drawn_from[rows], sampled.ids[rows], *values[:4])
            ids[rows], logprobs[rows] = self._likeliest(scores, sampled.ids[rows], most)
        return replace(sampled, logprob_ids=ids, logprobs=logprobs)

    def _drawn_scores(self, *by_row: torch.Tensor) -> torch.Tensor:
        """``drawn_scores``, of one row at a time where its bits must not hang on how many there are."""
        if not self._row_by_row:
            return drawn_scores(*by_row)
        return torch.cat([drawn_scores(*(values[row : row + 1] for values in by_row)) for row in range(len(by_row[0]))])

    def _likeliest(self, scores: torch.Tensor, token_ids: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log-probs [S, most + 1]: the given tokens, then the likeliest of each row."""
        shape = (scores.shape[0], most + 1)
        ids = torch.empty(shape, dtype=torch.int32, device=scores.device)
        values = torch.empty(shape, dtype=torch.float32, device=scores.device)
        self._top_logprobs(scores, token_ids, out_ids=ids, out_logprobs=values)
        return ids, values


def _columns(table: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the rows of a table [4, S] of 32-bit values hold."""
    floats = table.view(torch.float32)
    return {"temperature": floats[0], "top_k": table[1], "top_p": floats[2], "min_p": floats[3]}
