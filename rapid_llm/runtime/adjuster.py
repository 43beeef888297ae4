"""What requests change about their logits, kept on the device: counts of tokens, biases, bans, and the last ids of a sequence.

Nothing here waits for an id: a step counts the ids that it samples on the device, so the next one may be planned before they
are known. A sequence that takes a slot again brings all its ids, and everything is built anew from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rapid_llm.config import ResolvedConfig
from rapid_llm.modules.placement import Placement
from rapid_llm.step import FOREVER, Adjust, SlotSetup

IN_PROMPT = 1 << 30
"""Added to the count of a token that the prompt holds; see the op adjust_logits."""

_FIRST_ROWS = 4  # of the table of counts; it doubles whenever it is full


@dataclass(frozen=True, slots=True)
class _SlotState:
    """What one slot's sequence asks for.

    Attributes:
        adjust: as it came.
        count_row: its row in the table of counts; -1 without penalties.
        until: the first position at which nothing is left to be done.
        tail: ids that its longest prefix looks back at.
    """

    adjust: Adjust
    count_row: int
    until: int
    tail: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """The states of one step's rows, on the device.

    Attributes:
        slots: the slot of each row.
        count_rows: [S] int32.
        penalties: repetition, presence and frequency, [S] fp32 each.
        edit_rows, edit_ids, edit_values, edit_until: [E], of all rows together.
        prefixes: [E, P] int32, right-aligned, -1 where anything may stand.
        is_conditional: whether any edit has an end or a prefix.
        edit_slots: [E] int64, the slot of each edit's row.
        counted, counted_rows: rows of the step whose ids are counted, and theirs in the table, [C] int64.
        tailed, tail_slots: rows of the step whose ids are remembered, and their slots, int64.
    """

    slots: tuple[int, ...]
    count_rows: torch.Tensor
    penalties: tuple[torch.Tensor, ...]
    edit_rows: torch.Tensor
    edit_ids: torch.Tensor
    edit_values: torch.Tensor
    edit_until: torch.Tensor
    prefixes: torch.Tensor
    is_conditional: bool
    edit_slots: torch.Tensor
    counted: torch.Tensor
    counted_rows: torch.Tensor
    tailed: torch.Tensor
    tail_slots: torch.Tensor


class Adjuster:
    """Adjusts logits where a sequence of the step asks for it; steps in which none does pay for nothing.

    The table of counts takes 4 bytes for each token of the vocabulary and sequence with penalties that runs at once. It is made
    for the first of them and grows by doubling, to ``max_num_seqs`` rows at most.
    """

    def __init__(self, config: ResolvedConfig, place: Placement, vocab_size: int) -> None:
        self._max_rows, self._device = config.max_num_seqs, place.device
        self._states: dict[int, _SlotState] = {}
        self._free_rows: list[int] = []
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=place.device)
        self._tails = torch.zeros((config.max_num_seqs, 0), dtype=torch.int32, device=place.device)
        self._gathered: _Batch | None = None
        self._kernel = place.kernel("adjust_logits", vocab_size=vocab_size)

    def setup(self, setups: Sequence[SlotSetup]) -> None:
        """Take over what sequences that got a slot ask for."""
        for setup in setups:
            self._drop(setup.slot)
            if setup.adjust is not None:
                self._states[setup.slot] = self._start(setup, setup.adjust)
                self._gathered = None

    def __call__(self, logits: torch.Tensor, slots: tuple[int, ...], positions: Sequence[int]) -> torch.Tensor | None:
        """New fp32 logits [S, vocab_size] for rows of these slots and next positions; None where no row has any adjusted."""
        for slot, position in zip(slots, positions, strict=True) if self._states else ():
            if slot in self._states and position >= self._states[slot].until:
                self._drop(slot)
        if self._states.keys().isdisjoint(slots):
            return None
        batch = self._gather(slots)
        values = batch.edit_values
        if batch.is_conditional:
            values = torch.where(self._holds(batch, positions), values, 0.0)
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        edits = (batch.edit_rows, batch.edit_ids, values)
        self._kernel(logits, self._counts, batch.count_rows, *batch.penalties, *edits, out=out)
        return out

    def prepare(self, logits: torch.Tensor) -> None:
        """Launch what any adjustment of such ``logits`` launches, on rows that ask for none."""
        size, device = len(logits), logits.device
        ones, zeros = torch.ones(size, device=device), torch.zeros(size, device=device)
        edit = torch.zeros(1, dtype=torch.int32, device=device)
        out = torch.empty(logits.shape, dtype=torch.float32, device=device)
        nobody = torch.full((size,), -1, dtype=torch.int32, device=device)
        self._kernel(logits, self._counts, nobody, ones, zeros, zeros, edit, edit, edit.float(), out=out)

    def edits(self, slot: int) -> bool:
        """Whether a slot's sequence raises or bans tokens."""
        return slot in self._states and bool(self._states[slot].adjust.edits)

    def note(self, slots: tuple[int, ...], ids: torch.Tensor) -> None:
        """Count the [S] ids that a step has sampled, and remember them where bad words look back at them; -1 is no id."""
        if self._states.keys().isdisjoint(slots):
            return
        batch = self._gather(slots)
        if batch.counted.shape[0]:
            taken = ids[batch.counted].long()
            self._counts[batch.counted_rows, taken.clamp(min=0)] += (taken >= 0).int()
        if batch.tailed.shape[0]:
            tails = torch.cat((self._tails[batch.tail_slots, 1:], ids[batch.tailed][:, None]), dim=1)
            self._tails[batch.tail_slots] = tails

    def _start(self, setup: SlotSetup, adjust: Adjust) -> _SlotState:
        count_row = -1
        if adjust.penalises:
            count_row = self._free_row()
            ids = torch.tensor(setup.token_ids, device=self._device)
            counts = self._counts[count_row]
            counts.zero_()
            counts[ids[: adjust.prompt_len]] = IN_PROMPT
            counts.index_add_(0, ids[adjust.prompt_len :], torch.ones_like(ids[adjust.prompt_len :], dtype=torch.int32))
        tail = max((len(edit.prefix) for edit in adjust.edits), default=0)
        if tail:
            self._widen_tails(tail)
            width = self._tails.shape[1]
            last = (*(-2,) * width, *setup.token_ids)[-width:]  # -2 is no id and no wildcard
            self._tails[setup.slot] = torch.tensor(last, dtype=torch.int32, device=self._device)
        until = FOREVER if adjust.penalises else max(edit.until for edit in adjust.edits)
        return _SlotState(adjust, count_row, until, tail)

    def _drop(self, slot: int) -> None:
        state = self._states.pop(slot, None)
        if state is not None:
            self._gathered = None
            if state.count_row >= 0:
                self._free_rows.append(state.count_row)

    def _free_row(self) -> int:
        """A row of the table of counts that nobody has; there is one for each slot at the latest."""
        if not self._free_rows:
            rows, vocab_size = self._counts.shape
            more = min(max(rows, _FIRST_ROWS), self._max_rows - rows)
            self._counts = torch.cat((self._counts, self._counts.new_zeros(more, vocab_size)))
            self._free_rows.extend(range(rows + more - 1, rows - 1, -1))
        return self._free_rows.pop()

    def _widen_tails(self, width: int) -> None:
        """Room for tails of ``width`` ids; what is further back than a sequence looked is of no use to it."""
        slots, held = self._tails.shape
        if held < width:
            self._tails = torch.cat((self._tails.new_full((slots, width - held), -2), self._tails), dim=1)

    def _gather(self, slots: tuple[int, ...]) -> _Batch:
        """The batch of these rows; decode steps have the same rows most often, and then it is there already."""
        if self._gathered is None or self._gathered.slots != slots:
            self._gathered = self._batch(slots)
        return self._gathered

    def _batch(self, slots: tuple[int, ...]) -> _Batch:
        states = [(row, self._states[slot]) for row, slot in enumerate(slots) if slot in self._states]
        count_rows, penalties = [-1] * len(slots), ([1.0] * len(slots), [0.0] * len(slots), [0.0] * len(slots))
        for row, state in states:
            count_rows[row], adjust = state.count_row, state.adjust
            values = (adjust.repetition_penalty, adjust.presence_penalty, adjust.frequency_penalty)
            for column, value in zip(penalties, values, strict=True):
                column[row] = value
        edits = [(row, edit) for row, state in states for edit in state.adjust.edits]
        width = max((state.tail for _, state in states), default=0)
        tailed = [row for row, state in states if state.tail]
        return _Batch(
            slots=slots,
            count_rows=self._ids(count_rows),
            penalties=tuple(self._floats(column) for column in penalties),
            edit_rows=self._ids([row for row, _ in edits]),
            edit_ids=self._ids([edit.token_id for _, edit in edits]),
            edit_values=self._floats([edit.value for _, edit in edits]),
            edit_until=self._ids([edit.until for _, edit in edits]),
            prefixes=self._ids([(*(-1,) * (width - len(edit.prefix)), *edit.prefix) for _, edit in edits]).view(
                len(edits), width
            ),
            is_conditional=any(edit.prefix or edit.until < FOREVER for _, edit in edits),
            edit_slots=self._ids([slots[row] for row, _ in edits]).long(),
            counted=self._ids([row for row, state in states if state.count_row >= 0]).long(),
            counted_rows=self._ids([state.count_row for _, state in states if state.count_row >= 0]).long(),
            tailed=self._ids(tailed).long(),
            tail_slots=self._ids([slots[row] for row in tailed]).long(),
        )

    def _holds(self, batch: _Batch, positions: Sequence[int]) -> torch.Tensor:
        """[E] bool: whether the condition of each edit is met where its row's next token stands."""
        early = self._ids(positions)[batch.edit_rows] < batch.edit_until
        width = batch.prefixes.shape[1]
        if not width:
            return early
        tails = self._tails[batch.edit_slots, self._tails.shape[1] - width :]
        return early & ((batch.prefixes < 0) | (batch.prefixes == tails)).all(dim=1)

    def _ids(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)
