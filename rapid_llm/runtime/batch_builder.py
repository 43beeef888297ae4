"""StepPlan -> ForwardBatch: every index tensor of a step, computed with numpy and sent in one copy."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from rapid_llm.config import PAGE_SIZE, ResolvedConfig
from rapid_llm.modules.forward_batch import ForwardBatch
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.transfers import Ints, to_device
from rapid_llm.step import PageUpdate, StepPlan


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What the host knows of a step, int32: as ForwardBatch, and who samples.

    Attributes:
        sampled_rows: without those that are scored, unless ``scores``.
        scores: whether logits of prompt tokens are wanted too.
        held, held_slots: packed indices of tokens whose id the device holds, and the slots that it holds them for.
        sampled_slots, sampled_positions: [S] whose token is sampled, and the position that it will have.
    """

    token_ids: Ints
    positions: Ints
    slot_mapping: Ints
    decode_rows: Ints
    decode_lens: Ints
    chunk_rows: Ints
    chunk_lens: Ints
    chunk_bounds: Ints
    sampled_rows: Ints
    sampled_slots: Ints
    sampled_positions: Ints
    held: Ints
    held_slots: Ints
    scores: bool = False

    @property
    def longest_chunk(self) -> int:
        """Tokens of the longest chunk; 0 without one."""
        return int(np.diff(self.chunk_bounds).max(initial=0))


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
        self._chunks_only = config.deterministic  # one kind of attention for all rows
        self._update_index = place.kernel("update_kv_index")

    def prepare(self) -> None:
        """Make the launch of ``add_pages`` once, on an entry outside of the table."""
        self._update_index(self.page_table, *to_device((np.array([-1], np.int32),) * 3, self.device))

    def add_pages(self, updates: list[PageUpdate]) -> None:
        """Enter new pages into the table."""
        if not updates:
            return
        pages = np.fromiter(chain.from_iterable(update.pages for update in updates), np.int32)
        lengths = [len(update.pages) for update in updates]
        slots = np.repeat(np.array([update.slot for update in updates], dtype=np.int32), lengths)
        columns = np.concatenate(
            [np.arange(update.column, update.column + len(update.pages), dtype=np.int32) for update in updates]
        )
        self._mirror[slots, columns] = pages
        self._update_index(self.page_table, *to_device((slots, columns, pages), self.device))

    def arrays(self, plan: StepPlan) -> StepArrays:
        """The indices of a step whose pages are in the table."""
        chunks, num_decodes = plan.chunks, 0 if self._chunks_only else len(plan.decodes)
        slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        ids = [chunk.token_ids or (0,) for chunk in chunks]
        lengths = np.array([len(its_ids) for its_ids in ids], dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        token_ids = np.fromiter(chain.from_iterable(ids), np.int32, count=int(ends[-1]))
        positions = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - lengths - starts, lengths)
        rows = self._mirror[np.repeat(slots, lengths), positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        num_keys = starts + lengths
        samples = np.array([chunk.samples for chunk in chunks], dtype=bool)
        wanted, scores = ends[samples] - 1, any(chunk.targets for chunk in chunks)
        if scores:  # those stand right before the sampled one, or at the end
            rows_of = (range(end - chunk.samples - len(chunk.targets), end) for end, chunk in zip(ends, chunks, strict=True))
            wanted = np.fromiter(chain.from_iterable(rows_of), np.int32)
        # Only single tokens can be on the device, and they come first in the packed order.
        held = np.array([i for i, chunk in enumerate(plan.decodes) if not chunk.token_ids], dtype=np.int32)
        return StepArrays(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=rows,
            decode_rows=slots[:num_decodes],
            decode_lens=num_keys[:num_decodes],
            chunk_rows=slots[num_decodes:],
            chunk_lens=num_keys[num_decodes:],
            chunk_bounds=np.concatenate(([num_decodes], ends[num_decodes:])).astype(np.int32),
            sampled_rows=wanted,
            sampled_slots=slots[samples],
            sampled_positions=num_keys[samples],
            held=held,
            held_slots=slots[held],
            scores=scores,
        )

    def build(self, step: StepArrays, last_ids: torch.Tensor) -> ForwardBatch:
        """A step's tensors, as long as it is.

        Args:
            step: its indices.
            last_ids: [max_num_seqs] int32, the id sampled last in each slot, for chunks whose id the device holds.
        """
        names = (
            "token_ids", "positions", "slot_mapping", "decode_rows", "decode_lens", "chunk_rows", "chunk_lens", "chunk_bounds",
            "sampled_rows", "held", "held_slots",
        )  # fmt: skip
        sent = dict(zip(names, to_device(tuple(getattr(step, name) for name in names), self.device), strict=True))
        held, held_slots = sent.pop("held"), sent.pop("held_slots")
        if len(step.held):
            sent["token_ids"][held] = last_ids[held_slots]
        return ForwardBatch(**sent, longest_chunk=step.longest_chunk, page_table=self.page_table)
