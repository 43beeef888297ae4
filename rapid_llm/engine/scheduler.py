"""Who runs in the next step and how many tokens each: first come, first served, continuous batching, chunked prefill.

Decodes and prefill chunks share one token budget. A sequence that outgrows the pool takes the pages of the one admitted
last, which is computed anew later (preemption by recompute); noise hangs on (seed, position) alone, so its text stays the same.
"""

from collections import deque
from dataclasses import dataclass, field

from rapid_llm.config import PROMPT_LOGIT_ROWS, ResolvedConfig, pages_for
from rapid_llm.engine.request import Request
from rapid_llm.kvcache.page_allocator import PageAllocator
from rapid_llm.step import Chunk, PageUpdate, SlotSetup, StepPlan


@dataclass(slots=True)
class ScheduledStep:
    """A plan for the device and the requests that its results belong to, by slot.

    Attributes:
        sampled, scored: requests whose next id is sampled, and those of whose prompt log-probs are taken.
        score_room: prompt tokens that may still be scored. A request whose turn comes may score one even where none is left, so
            that nobody waits for another's long prompt.
    """

    plan: StepPlan
    sampled: dict[int, Request] = field(default_factory=dict)
    scored: dict[int, Request] = field(default_factory=dict)
    score_room: int = PROMPT_LOGIT_ROWS


class Scheduler:
    """Holds the queues; hands out device slots and pages."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.max_batched_tokens = config.max_batched_tokens
        self.allocator = PageAllocator(config.num_pages)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request whose whole length fits the pool (the engine has checked)."""
        self.waiting.append(request)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None when nothing can run."""
        step = ScheduledStep(StepPlan())
        budget = self.max_batched_tokens
        for request in list(self.running):
            count = min(request.num_to_compute, budget)
            if request.rules.needs_prompt_logits:
                count = _scorable(request, count, step)
            if count == 0 or request.slot is None:  # all ids are in flight, the budget is spent, or it was just preempted
                continue
            if self._grow(request, count, step):
                self._place(request, count, step)
                budget -= count
        # Whoever gave way just now heads the queue and cannot come straight back: it needs all the pages that it gave.
        self._admit(budget, step)
        return step if step.plan.decodes or step.plan.prefills else None

    def finish(self, request: Request) -> None:
        """Take a request out, whatever state it is in, and free what it holds.

        A step in flight may still write one row for it. Steps run in order, so whoever is given the page next writes after that.
        """
        if request.slot is None:
            if request in self.waiting:
                self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._release(request)

    def _admit(self, budget: int, step: ScheduledStep) -> None:
        """Start waiting requests in their order while budget, slots and pages for the whole of each are there."""
        while self.waiting and budget and self._free_slots:
            request = self.waiting[0]
            if pages_for(request.num_tokens) > self.allocator.num_free:
                return
            self.waiting.popleft()
            request.slot = self._free_slots.pop()
            self.running.append(request)
            step.plan.slots.append(_setup(request, request.slot))
            count = _scorable(request, min(request.num_to_compute, budget), step)
            self._grow(request, count, step)
            self._place(request, count, step)
            budget -= count

    def _grow(self, request: Request, count: int, step: ScheduledStep) -> bool:
        """Give ``request`` pages for ``count`` more tokens; False when it had to give way itself."""
        missing = pages_for(request.num_computed + count) - len(request.pages)
        while (pages := self.allocator.allocate(missing)) is None:
            # Those behind it in the queue came later, so they are not part of this plan yet.
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        for page in pages:
            step.plan.pages.append(PageUpdate(request.slot or 0, len(request.pages), page))
            request.pages.append(page)
        return True

    def _place(self, request: Request, count: int, step: ScheduledStep) -> None:
        """Put ``count`` tokens of ``request`` into the plan."""
        slot, start, end = request.slot or 0, request.num_computed, request.num_computed + count
        samples = end == request.num_tokens
        # The id sampled last in this slot is on the device, collected or not; every other id is known here.
        newest = request.holds_newest and count == 1
        token_ids = () if newest else tuple(request.token_ids[start:end])
        targets = _score(request, end, step) if request.rules.needs_prompt_logits else ()
        chunk = Chunk(slot, start, token_ids, samples, targets)
        (step.plan.decodes if count == 1 else step.plan.prefills).append(chunk)
        request.num_computed = end
        if samples:
            request.num_in_flight += 1
            request.holds_newest = True
            step.sampled[slot] = request

    def _preempt(self, request: Request) -> None:
        """Take slot and pages from a running request and put it at the head of the queue, to be computed anew."""
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.allocator.free(request.pages)
        request.pages = []
        if request.slot is not None:
            self._free_slots.append(request.slot)
        request.slot = None
        request.holds_newest = False


def _scorable(request: Request, count: int, step: ScheduledStep) -> int:
    """``count`` tokens of a chunk, or as many as the step has room to score."""
    if not request.num_to_score:
        return count
    return min(count, request.num_scored - request.num_computed + max(step.score_room, 1))


def _score(request: Request, end: int, step: ScheduledStep) -> tuple[int, ...]:
    """Ids of the prompt that a chunk up to ``end`` is the first to bring log-probs of; notes that it does."""
    targets = tuple(request.token_ids[request.num_scored + 1 : min(end, request.prompt_len - 1) + 1])
    if targets and request.slot is not None:
        request.num_scored += len(targets)
        step.score_room -= len(targets)
        step.scored[request.slot] = request
    return targets


def _setup(request: Request, slot: int) -> SlotSetup:
    """What the device keeps of ``request``, whose every id is known when it takes a slot."""
    rules = request.rules
    return SlotSetup(
        slot=slot,
        temperature=rules.temperature,
        top_k=rules.top_k,
        top_p=rules.top_p,
        min_p=rules.min_p,
        seed=rules.seed,
        logprobs=rules.logprobs,
        processed=rules.processed,
        prompt_logprobs=rules.prompt_logprobs,
        adjust=rules.adjust,
        token_ids=() if rules.adjust is None else tuple(request.token_ids),
    )
