"""An engine over the worker without tensors, run to its end and looked through for what must hold at every step."""

import math
from collections import Counter

from rapid_llm.config import PAGE_SIZE, ResolvedConfig
from rapid_llm.engine.engine import Engine
from rapid_llm.engine.request import Request, TokenRules
from tests.engine.fake_worker import FakeWorker

CONTEXT = 8 * PAGE_SIZE


def make_engine(
    num_pages=64,
    max_num_seqs=4,
    max_batched_tokens=64,
    depth=0,
    worker=FakeWorker,
    *,
    context=CONTEXT,
    prefix_cache=True,
    max_step_ms=math.inf,
):
    config = ResolvedConfig(context, max_num_seqs, max_batched_tokens, num_pages, prefix_cache, max_step_ms)
    return Engine(config, worker(config, depth))


def request(name, prompt, count, end_ids=(), seed=0):
    return Request(name, list(prompt), TokenRules(count, frozenset(end_ids), seed=seed))


def collect(engine, results, limit=20_000):
    """Run until idle; ids and reason by request."""
    for _ in range(limit):
        if not engine.has_work:
            return results
        take(engine.step(), results)
    raise AssertionError("the engine does not come to an end")


def take(outputs, results):
    for output in outputs:
        ids, reason = results.get(output.request_id, ([], None))
        assert reason is None, "an output after the last one"
        results[output.request_id] = (ids + ([output.token.token_id] if output.token else []), output.finish_reason)


def assert_pages_are_sound(engine):
    """Holders are counted right, and what a request may still write belongs to it alone and cannot be found."""
    scheduler = engine.scheduler
    allocator, cache = scheduler.allocator, scheduler.pages.cache
    holders = Counter(page for one in scheduler.running for page in one.pages)
    assert {page: count for page, count in enumerate(allocator._holders) if count} == holders
    assert allocator.num_free == engine.config.num_pages - len(holders)
    found = set() if cache is None else set(cache._contents)
    assert found == {page for page, kept in enumerate(allocator._kept) if kept}
    assert set(allocator._idle) == found - set(holders)
    for one in scheduler.running:
        assert len(one.pages) == len(set(one.pages))
        for page in one.pages[one.num_computed // PAGE_SIZE :]:
            assert holders[page] == 1, "a page that is not full is shared"
            assert page not in found, "a page that is not full can be found"


def assert_nothing_leaked(engine):
    scheduler = engine.scheduler
    assert_pages_are_sound(engine)
    assert scheduler.allocator.num_free == engine.config.num_pages
    assert len(scheduler._free_slots) == min(engine.config.max_num_seqs, engine.config.max_batched_tokens)
    assert not scheduler.running
    assert not scheduler.waiting
