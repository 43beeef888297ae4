"""StepPlan -> ForwardBatch: every index tensor of a step, computed with numpy and sent in one copy."""

from itertools import chain

import numpy as np
import torch

from rapid_llm.config import PAGE_SIZE, ResolvedConfig
from rapid_llm.modules.forward_batch import ForwardBatch
from rapid_llm.modules.placement import Placement
from rapid_llm.step import StepPlan


class BatchBuilder:
    """Keeps the page table, on the device for the kernels and mirrored on the host, where slots are computed.

    Attributes:
        page_table: [max_num_seqs, pages_per_sequence] int32.
    """

    def __init__(self, config: ResolvedConfig, place: Placement) -> None:
        self.device = place.device
        shape = (config.max_num_seqs, config.pages_per_sequence)
        self.page_table = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._mirror = np.zeros(shape, dtype=np.int32)
        self._update_index = place.kernel("update_kv_index")

    def build(self, plan: StepPlan, last_ids: torch.Tensor) -> ForwardBatch:
        """Apply the plan's page updates and make its tensors.

        Args:
            plan: decodes and prefills, in the order of the packed tokens.
            last_ids: [max_num_seqs] int32, the id sampled last in each slot, for chunks whose id the device holds.
        """
        pages = np.array([(update.slot, update.column, update.page) for update in plan.pages], dtype=np.int32).reshape(-1, 3)
        if plan.pages:
            self._mirror[pages[:, 0], pages[:, 1]] = pages[:, 2]

        chunks = plan.chunks
        slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        token_ids = np.fromiter(chain.from_iterable(chunk.token_ids or (0,) for chunk in chunks), np.int32, count=int(ends[-1]))
        positions = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - lengths - starts, lengths)
        rows = self._mirror[np.repeat(slots, lengths), positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        num_decodes = len(plan.decodes)
        prefill_lengths = lengths[num_decodes:]
        bounds = np.concatenate(([0], np.cumsum(prefill_lengths))).astype(np.int32)
        wanted = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        if any(chunk.targets for chunk in chunks):
            scored = (range(end - chunk.samples - len(chunk.targets), end) for end, chunk in zip(ends, chunks, strict=True))
            wanted = list(chain.from_iterable(scored))
        # Only single tokens can be on the device, and they come first in the packed order.
        held = np.array([i for i, chunk in enumerate(plan.decodes) if not chunk.token_ids], dtype=np.int32)

        sampled = np.array(wanted, dtype=np.int32)
        parts = (token_ids, positions, rows, slots, starts + lengths, bounds, sampled, held, slots[held], *pages.T)
        sent = self._send(parts)
        if plan.pages:
            self._update_index(self.page_table, *sent[9:])
        ids = sent[0]
        if len(held):
            ids[sent[7]] = last_ids[sent[8]]
        return ForwardBatch(
            token_ids=ids,
            positions=sent[1],
            slot_mapping=sent[2],
            num_decodes=num_decodes,
            table_rows=sent[3],
            seq_lens=sent[4],
            cu_seqlens_q=sent[5],
            max_seqlen_q=int(prefill_lengths.max()) if len(prefill_lengths) else 0,
            page_table=self.page_table,
            sampled_rows=sent[6],
        )

    def _send(self, parts: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
        """All parts in one host-to-device copy; views of it, each on a 16-byte boundary as kernels like it."""
        padded = [len(part) + -len(part) % 4 for part in parts]
        packed = torch.zeros(sum(padded), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        views, start = packed.numpy(), 0
        for part, size in zip(parts, padded, strict=True):
            views[start : start + len(part)] = part
            start += size
        on_device = torch.split(packed.to(self.device, non_blocking=True), padded)
        return [view[: len(part)] for view, part in zip(on_device, parts, strict=True)]
