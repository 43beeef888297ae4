"""What grammars allow, on the device: the masks of one step in one copy, for the rows that have one."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.transfers import to_device


class Masks:
    """Bans what masks do not allow; steps without one pay for nothing."""

    def __init__(self, place: Placement, vocab_size: int) -> None:
        self._device, self._words = place.device, -(-vocab_size // 32)
        self._kernel = place.kernel("mask_logits", vocab_size=vocab_size)

    def __call__(self, logits: torch.Tensor, slots: Sequence[int], masks: Mapping[int, bytes]) -> torch.Tensor:
        """New fp32 logits [S, vocab_size].

        Args:
            logits: [S, vocab_size].
            slots: the slot of each row.
            masks: by slot, a bit for each id, little end first, in words of 32; a slot without one may say anything.
        """
        numbers = {slot: number for number, slot in enumerate(masks)}
        rows = np.array([numbers.get(slot, -1) for slot in slots], dtype=np.int32)
        words = np.frombuffer(b"".join(masks.values()), dtype="<i4").astype(np.int32, copy=False)
        words_there, rows_there = to_device((words, rows), self._device)
        return self._masked(logits, words_there.view(len(masks), self._words), rows_there)

    def prepare(self, logits: torch.Tensor) -> None:
        """Launch what masks of such ``logits`` launch, on rows that have none."""
        nobody = torch.full((len(logits),), -1, dtype=torch.int32, device=self._device)
        self._masked(logits, torch.zeros((1, self._words), dtype=torch.int32, device=self._device), nobody)

    def _masked(self, logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        self._kernel(logits, masks, rows, out=out)
        return out
