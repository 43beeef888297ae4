"""StepPlan and StepResult: the only two messages between scheduling and device. Integers only, so they cross processes."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """A sequence that takes a device slot: what the sampler keeps for it there.

    Attributes:
        slot: row of the per-sequence device tables (page table, last ids, sampling values).
        temperature, top_k, top_p, min_p, seed: as in SamplingParams; top_k 0 is off.
        logprobs: tokens to report beside the chosen one; -1 reports none at all.
    """

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logprobs: int


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """A new page of a growing sequence: ``page_table[slot, column] = page``."""

    slot: int
    column: int
    page: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's share of a step.

    Attributes:
        slot: its device slot.
        start: position of the first token in the sequence.
        token_ids: the ids; empty means the one token that the device sampled last for this slot and still holds.
        samples: whether the token after this chunk is sampled.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return len(self.token_ids) or 1


@dataclass(slots=True)
class StepPlan:
    """One packed step: decodes (chunks of one token) before prefills, and what changed on the device's tables."""

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    slots: list[SlotSetup] = field(default_factory=list)
    pages: list[PageUpdate] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks, in the order of the packed tokens."""
        return self.decodes + self.prefills


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled id, -1 where the logits held no number to sample from.

    Attributes:
        token_id: the id.
        logprob_ids, logprobs: what was asked for in SlotSetup: the chosen token first, then the likeliest.
    """

    token_id: int
    logprob_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought.

    Attributes:
        tokens: sampled tokens by slot, one for each chunk of the plan that samples.
        seconds: how long the device worked on it; None where that is not measured.
    """

    tokens: dict[int, SampledToken]
    seconds: float | None = None
