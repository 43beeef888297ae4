"""Hidden states of prompts -> one vector each, as chunks bring them: the last one, or the mean, summed up in float32."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rapid_llm.runtime.transfers import to_pinned
from rapid_llm.step import SlotSetup, StepPlan


@dataclass(frozen=True, slots=True)
class PooledPrompts:
    """Vectors that are on the device.

    Attributes:
        slots: whose each row is.
        rows: [len(slots), hidden_size] float32.
    """

    slots: tuple[int, ...]
    rows: torch.Tensor

    def to_host(self) -> "PooledPrompts":
        """A copy that is on its way to pinned host memory."""
        return replace(self, rows=to_pinned(self.rows))

    def vectors(self) -> dict[int, bytes]:
        """Each slot's vector, as in StepResult."""
        is_sound = self.rows.isfinite().all(-1).tolist()
        pairs = zip(self.slots, self.rows.numpy(), is_sound, strict=True)
        return {slot: row.astype("<f4").tobytes() if sound else b"" for slot, row, sound in pairs}


class Pooler:
    """Keeps, by slot, what a prompt that becomes a vector has come to: the sum of its hidden states where their mean is wanted.

    A sequence that is computed anew takes a slot anew, and begins with nothing.
    """

    def __init__(self) -> None:
        self._pooling: dict[int, str] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def setup(self, setups: Sequence[SlotSetup]) -> None:
        """Take over what sequences that got a slot ask for."""
        for setup in setups:
            self._sums.pop(setup.slot, None)
            if setup.pooling:
                self._pooling[setup.slot] = setup.pooling
            else:
                self._pooling.pop(setup.slot, None)

    def wants(self, plan: StepPlan) -> bool:
        """Whether a step must bring hidden states."""
        if not self._pooling:
            return False
        return any(chunk.pools or self._pooling.get(chunk.slot) == "mean" for chunk in plan.chunks)

    def __call__(self, hidden: torch.Tensor, plan: StepPlan) -> PooledPrompts | None:
        """Take in the hidden states [T, hidden_size] of a step; the vectors of prompts that end in it, None if none does."""
        slots: list[int] = []
        rows: list[torch.Tensor] = []
        end = 0
        for chunk in plan.chunks:
            start, end = end, end + chunk.length
            if self._pooling.get(chunk.slot) == "mean":
                total = hidden[start:end].sum(0, dtype=torch.float32)
                self._sums[chunk.slot] = total + self._sums.get(chunk.slot, 0.0)
            if chunk.pools:
                slots.append(chunk.slot)
                rows.append(self._vector(chunk.slot, hidden[end - 1], chunk.start + chunk.length))
        return PooledPrompts(tuple(slots), torch.stack(rows)) if slots else None

    def _vector(self, slot: int, last: torch.Tensor, length: int) -> torch.Tensor:
        return self._sums.pop(slot) / length if self._pooling[slot] == "mean" else last.float()
