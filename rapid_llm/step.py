"""StepPlan and StepResult: the only two messages between scheduling and device. Integers only, so they cross processes."""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

NO_NUMBER, ALL_BANNED, NO_WAY_ON = -1, -2, -3
"""What stands in place of an id where there was none to sample: logits that are damaged, every token banned, or a grammar that
cannot go on."""

FOREVER = 2**31 - 1
"""A position that no sequence reaches."""


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What there is one of for each sequence and step: made in a tenth of a frozen dataclass's time. Never part of a cycle."""


class Edit(NamedTuple):
    """One token's logit, changed under a condition.

    Attributes:
        token_id: whose; below the vocabulary's size.
        value: what is added to it; -inf bans the token.
        until: the first position at which it is left alone.
        prefix: ids that must stand right before, prompt included; none is no condition.
    """

    token_id: int
    value: float
    until: int = FOREVER
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Adjust:
    """What is done to a sequence's logits before it is sampled from.

    Attributes:
        repetition_penalty, presence_penalty, frequency_penalty: as in SamplingParams.
        edits: at most one with a finite value for a token.
        prompt_len: ids of the prompt; those behind it count as put out.
    """

    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    edits: tuple[Edit, ...]
    prompt_len: int

    @property
    def penalises(self) -> bool:
        """Whether tokens that occurred are told from others."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """A sequence that takes a device slot: what the sampler keeps for it there.

    Attributes:
        slot: row of the per-sequence device tables (page table, last ids, sampling values).
        temperature, top_k, top_p, min_p, seed: as in SamplingParams; top_k 0 is off.
        logprobs: tokens to report beside the chosen one; -1 reports none at all.
        processed: whether these are of the distribution that the token was drawn from, rather than of the model's own.
        prompt_logprobs: the same of each id in ``Chunk.targets``, always of the model's own distribution.
        adjust: None where logits are taken as they are.
        token_ids: the sequence so far, which counts for ``adjust``; empty where that is None.
        pooling: of a prompt that is to become a vector: "last" or "mean" of its hidden states; empty where ids are sampled.
    """

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logprobs: int
    processed: bool = False
    prompt_logprobs: int = -1
    adjust: Adjust | None = None
    token_ids: tuple[int, ...] = ()
    pooling: str = ""


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """New pages of a sequence: ``page_table[slot, column : column + len(pages)] = pages``."""

    slot: int
    column: int
    pages: tuple[int, ...]


class Chunk(Record, frozen=True):
    """One sequence's share of a step.

    Attributes:
        slot: its device slot.
        start: position of the first token in the sequence.
        token_ids: the ids; empty means the one token that the device sampled last for this slot and still holds.
        samples: whether the token after this chunk is sampled.
        mask: with ``samples``, a bit for each id that may be sampled, little end first, in words of 32; empty allows all.
        targets: ids of the prompt whose log-probs are asked for: each follows one of the chunk's last tokens, the one whose
            successor is sampled left out.
        pools: whether the prompt ends here and its vector is wanted.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    targets: tuple[int, ...] = ()
    mask: bytes = b""
    pools: bool = False

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


class SampledToken(Record, frozen=True):
    """One sampled id, or one of the prompt whose log-probs were asked for.

    Attributes:
        token_id: the id; NO_NUMBER or ALL_BANNED where none could be sampled.
        logprob_ids, logprobs: what was asked for in SlotSetup: the token itself first, then the likeliest. Of damaged logits they
            are -1 and NaN.
    """

    token_id: int
    logprob_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, by slot.

    Attributes:
        tokens: the sampled token of each chunk that samples.
        scored: the ``targets`` of each chunk that has some.
        vectors: the vector of each chunk that pools: [hidden_size] float32 as bytes, little end first; empty where the model's
            output held no numbers.
        seconds: how long the device worked on it; None where that is not measured.
    """

    tokens: dict[int, SampledToken]
    scored: dict[int, tuple[SampledToken, ...]] = field(default_factory=dict)
    vectors: dict[int, bytes] = field(default_factory=dict)
    seconds: float | None = None
