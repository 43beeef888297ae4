"""Decode steps that were run once run again from a recording: the same kernels on the same tensors, without the layers' Python.

On a CPU a step of one sequence spends a third of its time between its matrix products. A recording keeps the kernel calls of
such a step in order (``modules/placement.py``), checks and views done, so that a replay is a loop over prepared calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rapid_llm.modules.forward_batch import ForwardBatch, LayerPool
from rapid_llm.modules.placement import Call, Recorder

MAX_SEQUENCES = 8
"""Larger steps compute long enough that the host's work no longer shows."""

# Chunks of one token each begin and end where they always do.
_CHANGES = ("token_ids", "positions", "slot_mapping", "decode_rows", "decode_lens", "chunk_rows", "chunk_lens")

Model = Callable[[ForwardBatch, Sequence[LayerPool]], torch.Tensor]
"""A packed step over the per-layer pools to logits of its sampled rows."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A step that can be run again.

    Attributes:
        batch: the tensors its calls read; a replay first brings them up to date.
        calls: what to run, in order.
        logits: what the last call writes.
    """

    batch: ForwardBatch
    calls: tuple[Call, ...]
    logits: torch.Tensor


class RecordedSteps:
    """Runs packed steps of a model, from a recording where there can be one.

    Args:
        model: what runs a step.
        pools: its KV pool, layer by layer.
        recorder: sees every kernel call of the model.

    Attributes:
        enabled: whether steps are recorded at all.
    """

    def __init__(self, model: Model, pools: Sequence[LayerPool], recorder: Recorder) -> None:
        self.model, self.pools, self.recorder, self.enabled = model, pools, recorder, True
        self._recordings: dict[tuple[int, int], Recording] = {}  # by tokens, and how many of them are decodes: all or none

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of the step's sampled rows; valid until the next call."""
        num_tokens = batch.token_ids.shape[0]
        num_decodes, num_chunks = batch.num_decodes, batch.chunk_rows.shape[0]
        is_of_one_kind = num_tokens in (num_decodes, num_chunks) and num_tokens == num_decodes + num_chunks
        is_plain = is_of_one_kind and num_tokens == batch.sampled_rows.shape[0]
        if not self.enabled or not is_plain or num_tokens > MAX_SEQUENCES:
            return self.model(batch, self.pools)
        recording = self._recordings.get((num_tokens, num_decodes))
        if recording is None:
            return self._record(batch)
        for name in _CHANGES:
            getattr(recording.batch, name).copy_(getattr(batch, name))
        for call in recording.calls:
            call()
        return recording.logits

    def _record(self, batch: ForwardBatch) -> torch.Tensor:
        with self.recorder.record() as calls:
            logits = self.model(batch, self.pools)
        self._recordings[batch.token_ids.shape[0], batch.num_decodes] = Recording(batch, tuple(calls), logits)
        return logits
