"""Who runs in the next step and how many tokens each: first come, first served, continuous batching, chunked prefill.

Every running sequence that decodes has its token in every step; prefill chunks share what is left of the token budget and, while
anybody decodes, of the time that a step may take. Prompts are served in the order they came, with a slice of each step for those
behind a long one; where several begin alike, the first computes what they share.

A sequence that outgrows the pool takes the pages of the one admitted last, which is computed anew later (preemption by
recompute); noise hangs on (seed, position) alone, so its text stays the same.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field

from rapid_llm.config import PAGE_SIZE, PROMPT_LOGIT_ROWS, ResolvedConfig, mixed_sizes
from rapid_llm.engine.request import Request
from rapid_llm.engine.request_pages import RequestPages
from rapid_llm.engine.step_time import QUERY_TILE, StepLoad, StepTime
from rapid_llm.kvcache.page_allocator import PageAllocator
from rapid_llm.step import Chunk, PageUpdate, SlotSetup, StepPlan, StepResult

SLICE = 128
"""Tokens of a step that each prompt behind a longer one gets; where that is more than half of the step, they share a half."""
MOST_PREFILLS = 8
"""Prompts that are computed at once, unless one step holds more of them whole."""
MIN_CHUNK = QUERY_TILE
"""Tokens that the first prompt gets whatever a step is expected to take, so that it comes to an end: fewer take no less."""
DECODE_SHARE = 3
"""A step may always take this many times what its decodes take alone: a prompt then has two thirds of the time."""


@dataclass(slots=True)
class ScheduledStep:
    """A plan for the device and what it means for the requests in it.

    Attributes:
        plan: the plan.
        sampled, scored, pooled: by slot, requests whose next id is sampled, those of whose prompt log-probs are taken, and those
            whose vector comes.
        score_room: prompt tokens that may still be scored. A request whose turn comes may score one even where none is left, so
            that nobody waits for another's long prompt.
        written: of those with a page that is full once the step is done and cannot be found yet: (request, how many pages of it
            are full then, its ``num_preemptions`` when this was planned).
        load: how much work it is.
    """

    plan: StepPlan
    sampled: dict[int, Request] = field(default_factory=dict)
    scored: dict[int, Request] = field(default_factory=dict)
    pooled: dict[int, Request] = field(default_factory=dict)
    score_room: int = PROMPT_LOGIT_ROWS
    written: list[tuple[Request, int, int]] = field(default_factory=list)
    load: StepLoad = field(default_factory=StepLoad)


class Scheduler:
    """Holds the queues; hands out device slots and pages.

    Attributes:
        num_preemptions: times that a request lost its pages.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.max_batched_tokens = config.max_batched_tokens
        self.max_step_seconds = config.max_step_ms / 1000
        self.allocator = PageAllocator(config.num_pages)
        self.pages = RequestPages(self.allocator, config.prefix_cache)
        self.step_time = StepTime(mixed_sizes(config.max_batched_tokens))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        # Everybody who runs needs a token in each step.
        self._free_slots = list(range(min(config.max_num_seqs, config.max_batched_tokens) - 1, -1, -1))
        self._untold = StepPlan()
        self._head_waits = False  # for pages: until some are given back, another look at it is not worth its time

    def add(self, request: Request) -> None:
        """Queue a request whose whole length fits the pool (the engine has checked)."""
        self.waiting.append(request)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None when nothing can run."""
        step = ScheduledStep(StepPlan())
        prefills = []
        for request in list(self.running):
            count = request.num_to_compute
            if count > 1:
                prefills.append(request)
            # One that was preempted just now has no slot any more.
            elif count == 1 and request.slot is not None and (request.has_room or self._grow(request, step)):
                self._place(request, 1, step)
        step.load.add_decodes(step.plan.decodes)
        self._prefill([request for request in prefills if request.slot is not None], step)
        return step if self._is_due(step.plan) else None

    def _is_due(self, plan: StepPlan) -> bool:
        """Whether a plan runs anything. What a plan that does not would tell of slots and pages, the next one tells."""
        before, self._untold = self._untold, StepPlan()
        if before.slots or before.pages:
            plan.slots = list({setup.slot: setup for setup in before.slots + plan.slots}.values())
            pages = {
                (update.slot, column): page
                for update in before.pages + plan.pages
                for column, page in enumerate(update.pages, update.column)
            }
            plan.pages = [PageUpdate(slot, column, (page,)) for (slot, column), page in pages.items()]
        if plan.decodes or plan.prefills:
            return True
        self._untold = plan
        return False

    def collect(self, step: ScheduledStep, result: StepResult) -> None:
        """Take in that a step is done: full pages can be found from now on, and its time is known.

        Pages that a request has lost meanwhile are not looked at: somebody else may have them.
        """
        if result.seconds is not None:
            self.step_time.observe(step.load, result.seconds)
        for request, num_pages, num_preemptions in step.written:
            if request.slot is not None and request.num_preemptions == num_preemptions:
                self.pages.publish(request, num_pages)

    def finish(self, request: Request) -> None:
        """Take a request out, whatever state it is in, and free what it holds.

        A step in flight may still write one row for it. Steps run in order, so whoever is given the page next writes after that;
        a page that can be found is full by then and not the one that is written. Of a request whose logits held no number nothing
        is found again.
        """
        if request.finish_reason == "error":
            self.pages.distrust(request)
        if request.slot is None:
            if request in self.waiting:
                self.waiting.remove(request)
                self._head_waits = False
        else:
            self.running.remove(request)
            self._release(request)

    def preempt(self, request: Request) -> None:
        """Take slot and pages from a running request and put it at the head of the queue, to be computed anew."""
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _prefill(self, prefills: list[Request], step: ScheduledStep) -> None:
        """Give what the decodes leave of the step to those who prefill already, and to those whose turn it is to begin."""
        room = self.max_batched_tokens - step.load.tokens
        for request in prefills:
            self._tell(request, self.pages.skip_found(request), step)
        prefills += self._admit(room, prefills, step)
        if prefills:
            followers = self.pages.followers(self.running)
            self._share(room, [request for request in prefills if request not in followers], step)

    def _admit(self, room: int, prefills: list[Request], step: ScheduledStep) -> list[Request]:
        """Start waiting requests in their order while slots and pages for all of each are there, and work for a step is not."""
        admitted: list[Request] = []
        wanted = sum(request.num_to_compute for request in prefills)
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            if wanted >= room and len(prefills) + len(admitted) >= MOST_PREFILLS:
                break
            if not self._start(request, step):
                break
            self.waiting.popleft()
            admitted.append(request)
            wanted += request.num_to_compute
        return admitted

    def _start(self, request: Request, step: ScheduledStep) -> bool:
        """Give a request slot and pages; False when too few are free, or it was preempted and its newest id is not known yet."""
        if request.num_in_flight or self._head_waits:
            return False
        # All who run will soon need a page each: without it, one who comes in would have to go at once.
        reserve = len(self.running) + 1 if self.running else 0
        if not self.pages.start(request, reserve):
            self._head_waits = True
            return False
        request.queue_seconds = request.queue_seconds or time.monotonic() - request.made
        request.slot = self._free_slots.pop()
        self.running.append(request)
        step.plan.slots.append(_setup(request, request.slot))
        self._tell(request, range(len(request.pages)), step)
        return True

    def _share(self, room: int, prefills: list[Request], step: ScheduledStep) -> None:
        """Divide ``room`` tokens among those who prefill: to each in its order what it needs, less a slice for each one behind.

        The first keeps half, whatever is behind it, and so none of those that follow can keep it from its end.
        """
        bound = self.max_step_seconds if step.plan.decodes else math.inf  # nobody waits for a step in which nobody decodes
        bound = max(bound, DECODE_SHARE * self.step_time.seconds(step.load))
        behind = sum(min(request.num_to_compute, SLICE) for request in prefills)
        for i, request in enumerate(prefills):
            need = request.num_to_compute
            behind -= min(need, SLICE)
            left = self.step_time.tokens_within(bound, step.load, request.num_computed, room)
            left = left if i else max(left, min(room, MIN_CHUNK))
            share = -(-left // (2 if i == 0 else len(prefills) - i))
            count = _scorable(request, min(need, max(left - behind, share)), step)
            if count > 0:
                step.load.add(request.num_computed, count)
                self._place(request, count, step)
                room -= count

    def _grow(self, request: Request, step: ScheduledStep) -> bool:
        """Give ``request`` a page for one more token if it needs one; False when it had to give way itself."""
        before = len(request.pages)
        while not self.pages.grow(request):
            # Those behind it came later, so they are not part of this plan yet.
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        self._tell(request, range(before, len(request.pages)), step)
        return True

    def _tell(self, request: Request, columns: range, step: ScheduledStep) -> None:
        """Put pages that are new to a request into the plan."""
        if columns:
            pages = tuple(request.pages[columns.start : columns.stop])
            step.plan.pages.append(PageUpdate(request.slot or 0, columns.start, pages))

    def _place(self, request: Request, count: int, step: ScheduledStep) -> None:
        """Put ``count`` tokens of ``request`` into the plan."""
        slot, start, end = request.slot or 0, request.num_computed, request.num_computed + count
        is_end, pooling = end == request.num_tokens, request.rules.pooling
        samples, pools = is_end and not pooling, is_end and bool(pooling)
        # The id sampled last in this slot is on the device, collected or not; every other id is known here.
        newest = request.holds_newest and count == 1
        token_ids = () if newest else tuple(request.token_ids[start:end])
        targets = _score(request, end, step) if request.rules.needs_prompt_logits else ()
        mask = (request.mask or b"") if samples else b""
        chunk = Chunk(slot, start, token_ids, samples, targets, mask, pools)
        (step.plan.decodes if count == 1 else step.plan.prefills).append(chunk)
        if end // PAGE_SIZE > request.prefix.num_pages:
            step.written.append((request, end // PAGE_SIZE, request.num_preemptions))
        request.num_computed = end
        if pools:
            step.pooled[slot] = request
        if samples:
            request.num_in_flight += 1
            request.mask = None if request.rules.grammar is not None else b""
            request.holds_newest = True
            step.sampled[slot] = request

    def _release(self, request: Request) -> None:
        self.pages.release(request)
        self._head_waits = False
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
        pooling=rules.pooling,
    )
