"""Who runs in the next step and how many tokens each: first come, first served, continuous batching, chunked prefill.

Every running sequence that decodes has its token in every step; prefill chunks share what is left of the token budget and, while
anybody decodes, of the time that a step may take. Prompts are served in the order they came, with a slice of each step for those
behind a long one; where several begin alike, the first computes what they share. A sequence that outgrows the pool takes the pages of the one admitted last, which is computed anew later
(preemption by recompute); noise hangs on (seed, position) alone, so its text stays the same.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from rapid_llm.config import PAGE_SIZE, ResolvedConfig, pages_for
from rapid_llm.engine.request import Request
from rapid_llm.engine.step_time import StepLoad, StepTime
from rapid_llm.kvcache.page_allocator import PageAllocator
from rapid_llm.kvcache.prefix_cache import Prefix, PrefixCache
from rapid_llm.step import Chunk, PageUpdate, SlotSetup, StepPlan, StepResult

SLICE = 128
"""Tokens of a step that each prompt behind a longer one gets, as long as that one has half of the step; else they share a half."""
MOST_PREFILLS = 8
"""Prompts that are computed at once, unless one step holds more of them whole."""
MIN_CHUNK = 64
"""Tokens that the first prompt gets whatever a step is expected to take, so that it comes to an end."""
DECODE_SHARE = 3
"""A step may always take this many times what its decodes take alone: a prompt then has two thirds of the time."""


@dataclass(slots=True)
class ScheduledStep:
    """A plan for the device and what it means for the requests in it.

    Attributes:
        plan: the plan.
        sampled: the requests that its sampled ids belong to, by slot.
        written: (request, tokens of it that are written when the step is done, its ``num_preemptions`` when this was planned).
        load: how much work it is.
    """

    plan: StepPlan
    sampled: dict[int, Request] = field(default_factory=dict)
    written: list[tuple[Request, int, int]] = field(default_factory=list)
    load: StepLoad = field(default_factory=StepLoad)


class Scheduler:
    """Holds the queues; hands out device slots and pages.

    Attributes:
        num_admitted_tokens, num_cached_tokens: tokens of the requests admitted so far, and how many of them were in the cache.
        num_preemptions: times that a request lost its pages.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.max_batched_tokens = config.max_batched_tokens
        self.max_step_seconds = config.max_step_ms / 1000
        self.allocator = PageAllocator(config.num_pages)
        self.cache = PrefixCache(self.allocator) if config.prefix_cache else None
        self.step_time = StepTime()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_admitted_tokens = self.num_cached_tokens = self.num_preemptions = 0
        # Everybody who runs needs a token in each step.
        self._free_slots = list(range(min(config.max_num_seqs, config.max_batched_tokens) - 1, -1, -1))
        self._head_waits = False  # for pages: until some are given back, another look at it is not worth its time

    def add(self, request: Request) -> None:
        """Queue a request whose whole length fits the pool (the engine has checked)."""
        self.waiting.append(request)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None when nothing can run."""
        step = ScheduledStep(StepPlan())
        for request in [one for one in self.running if one.num_to_compute == 1]:
            # One that was preempted just now has no slot any more.
            if request.slot is not None and self._grow(request, step):
                self._place(request, 1, step)
        room = self.max_batched_tokens - step.load.tokens
        prefills = [one for one in self.running if one.num_to_compute > 1]
        for request in prefills:
            self._skip_cached(request, step)
        prefills += self._admit(room, prefills, step)
        if prefills:
            self._share(room, self._without_followers(prefills), step)
        return step if step.plan.decodes or step.plan.prefills else None

    def collect(self, step: ScheduledStep, result: StepResult) -> None:
        """Take in that a step is done: full pages can be found from now on, and its time is known.

        Pages that a request has lost meanwhile are not looked at: somebody else may have them.
        """
        if result.seconds is not None:
            self.step_time.observe(step.load, result.seconds)
        if self.cache is None:
            return
        for request, end, num_preemptions in step.written:
            if end // PAGE_SIZE <= request.prefix.num_pages:
                continue
            if request.slot is not None and request.num_preemptions == num_preemptions:
                request.prefix = self.cache.insert(request.token_ids, request.pages, request.prefix, end // PAGE_SIZE)

    def finish(self, request: Request) -> None:
        """Take a request out, whatever state it is in, and free what it holds.

        A step in flight may still write one row for it. Steps run in order, so whoever is given the page next writes after that;
        a page that can be found is full by then and not the one that is written. What a request computed whose logits held no
        number is not found again.
        """
        if request.finish_reason == "error" and self.cache is not None:
            self.cache.forget(request.pages)
        self._head_waits = False
        if request.slot is None:
            if request in self.waiting:
                self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._release(request)

    def preempt(self, request: Request) -> None:
        """Take slot and pages from a running request and put it at the head of the queue, to be computed anew."""
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.prefix = Prefix()
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._head_waits = False
        self.waiting.appendleft(request)

    def _admit(self, room: int, prefills: list[Request], step: ScheduledStep) -> list[Request]:
        """Start waiting requests in their order while slots and pages for all tokens of each are there, and work for a step is not."""
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
        hits, prefix = self._match(request)
        self.allocator.hold(hits)
        missing = pages_for(request.num_tokens) - len(hits)
        # All who run will soon need a page each: without it, one who comes in would have to go at once.
        reserve = len(self.running) + 1 if self.running else 0
        pages = self.allocator.allocate(missing) if missing + reserve <= self.allocator.num_free else None
        if pages is None:
            self._head_waits = True
            self.allocator.release(hits)
            return False
        request.slot = self._free_slots.pop()
        self.running.append(request)
        rules = request.rules
        values = (rules.temperature, rules.top_k, rules.top_p, rules.min_p, rules.seed, rules.logprobs)
        step.plan.slots.append(SlotSetup(request.slot, *values))
        self._give(request, hits + pages, step)
        self.num_admitted_tokens += request.num_tokens
        self._count_cached(request, prefix, len(hits))
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
            in_time = self.step_time.tokens_within(bound, step.load, request.num_computed)
            left = int(min(room, in_time if i else max(in_time, MIN_CHUNK)))
            share = -(-left // (2 if i == 0 else len(prefills) - i))
            count = min(need, max(left - behind, share))
            if count > 0:
                self._place(request, count, step)
                room -= count

    def _grow(self, request: Request, step: ScheduledStep) -> bool:
        """Give ``request`` a page for one more token if it needs one; False when it had to give way itself."""
        missing = pages_for(request.num_computed + 1) - len(request.pages)
        while (pages := self.allocator.allocate(missing)) is None:
            # Those behind it came later, so they are not part of this plan yet.
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        self._give(request, pages, step)
        return True

    def _give(self, request: Request, pages: list[int], step: ScheduledStep) -> None:
        for page in pages:
            step.plan.pages.append(PageUpdate(request.slot or 0, len(request.pages), page))
            request.pages.append(page)

    def _match(self, request: Request) -> tuple[list[int], Prefix]:
        """Pages of the cache that go on from the prefix of ``request``. Its last token is always computed, in a page of its own."""
        if self.cache is None:
            return [], request.prefix
        return self.cache.match(request.token_ids, request.prefix, (request.num_tokens - 1) // PAGE_SIZE)

    def _skip_cached(self, request: Request, step: ScheduledStep) -> None:
        """Take over pages that another request has finished meanwhile, where this one would compute the same."""
        first = request.prefix.num_pages
        if request.num_computed != first * PAGE_SIZE:
            return
        hits, prefix = self._match(request)
        if not hits:
            return
        self.allocator.hold(hits)
        self.allocator.release(request.pages[first : first + len(hits)])
        self._head_waits = False
        for column, page in enumerate(hits, first):
            request.pages[column] = page
            step.plan.pages.append(PageUpdate(request.slot or 0, column, page))
        self._count_cached(request, prefix, len(hits))

    def _without_followers(self, prefills: list[Request]) -> list[Request]:
        """Those whose next page nobody before them computes: the others can take it over once it is done."""
        if self.cache is None:
            return prefills
        in_work, followers = set(), set()
        for request in self.running:
            key = self.cache.next_key(request.token_ids, request.prefix)
            if key in in_work and request.num_computed == request.prefix.num_pages * PAGE_SIZE:
                followers.add(request)
            elif key is not None:
                in_work.add(key)
        return [request for request in prefills if request not in followers]

    def _count_cached(self, request: Request, prefix: Prefix, num_pages: int) -> None:
        request.prefix = prefix
        request.num_computed += num_pages * PAGE_SIZE
        self.num_cached_tokens += num_pages * PAGE_SIZE
        if request.num_preemptions == 0:
            request.num_cached_tokens += num_pages * PAGE_SIZE

    def _place(self, request: Request, count: int, step: ScheduledStep) -> None:
        """Put ``count`` tokens of ``request`` into the plan."""
        slot, start, end = request.slot or 0, request.num_computed, request.num_computed + count
        samples = end == request.num_tokens
        # The id sampled last in this slot is on the device, collected or not; every other id is known here.
        newest = request.holds_newest and count == 1
        chunk = Chunk(slot, start, () if newest else tuple(request.token_ids[start:end]), samples)
        (step.plan.decodes if count == 1 else step.plan.prefills).append(chunk)
        step.written.append((request, end, request.num_preemptions))
        step.load.add(start, count)
        request.num_computed = end
        if samples:
            request.num_in_flight += 1
            request.holds_newest = True
            step.sampled[slot] = request

    def _release(self, request: Request) -> None:
        self.allocator.release(request.pages)
        request.pages = []
        if request.slot is not None:
            self._free_slots.append(request.slot)
        request.slot = None
        request.holds_newest = False
