"""An engine in this process under streams that take turns. A seed gives the same steps every time."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rapid_llm import LLM, RequestError
from rapid_llm.engine.output import RequestOutput
from tests.engine.harness import assert_nothing_leaked, assert_pages_are_sound
from tests.soak.leftovers import check_none_left, living
from tests.soak.traffic import ALL_BANNED, AT_ONCE, CANARY, CANARY_PARAMS, LONG, OPTIONS, REFUSED, Reading, prompt, values

LOOK_EVERY = 50
"""Requests between two looks at the pages."""


@dataclass
class Stream:
    """A request that is read: ``kind`` is how it is to end, after ``items`` where its reader leaves."""

    kind: str
    outputs: Iterator[RequestOutput]
    reading: Reading
    items: int = 0


def run(folder: str, requests: int, seed: int) -> Counter:
    """AT_ONCE streams at a time; how each ended. Raises AssertionError where anything is lost, changed or left behind."""
    return talk_to(LLM(folder, device="cpu", **OPTIONS), requests, seed)


def talk_to(llm: LLM, requests: int, seed: int) -> Counter:
    """As ``run``, to an engine that is there."""
    before, ends = living(), Counter()
    _talk(llm, requests, random.Random(f"one process {seed}"), ends)
    engine = llm._engine
    for _ in range(engine.worker.depth):  # steps that a device was given before its last reader left
        engine.step()
    if sum(ends.values()) != requests:
        raise AssertionError(f"not every request ended once: {dict(ends)} of {requests}")
    if llm._live or engine.has_work:
        raise AssertionError(f"something is left behind: {llm._live}, {engine._requests}, {engine._in_flight}")
    if leaked := engine.config.num_pages - engine.scheduler.allocator.num_free:
        raise AssertionError(f"{leaked} pages are left behind")
    assert_nothing_leaked(engine)
    check_none_left(before)
    ends["preemptions"] = engine.scheduler.num_preemptions
    ends["cached tokens"] = engine.scheduler.pages.num_cached_tokens
    return ends


def _talk(llm: LLM, requests: int, draw: random.Random, ends: Counter) -> None:
    canary = llm.generate(CANARY, CANARY_PARAMS)[0].outputs[0].text
    streams: list[Stream] = []
    asked = 0
    while asked < requests or streams:
        if asked < requests and len(streams) < AT_ONCE:
            asked += 1
            _ask(llm, draw, streams, ends)
            if asked % LOOK_EVERY == 0:
                assert_pages_are_sound(llm._engine)
            continue
        at = draw.randrange(len(streams))
        if _read(streams[at], canary):
            ends[streams.pop(at).kind] += 1


def _ask(llm: LLM, draw: random.Random, streams: list[Stream], ends: Counter) -> None:
    """One more request; those that are refused, or left before they are read, have ended with it."""
    kind = draw.choices(("answered", "left", "never read", "refused", "all banned", "canary"), (12, 3, 1, 2, 1, 1))[0]
    if kind == "refused":
        try:
            llm.stream(*draw.choice(REFUSED)())
        except RequestError:
            ends[kind] += 1
            return
        raise AssertionError("what cannot be served was")
    asked = {"left": (prompt(draw), LONG), "all banned": ("x", ALL_BANNED), "canary": (CANARY, CANARY_PARAMS)}
    what, wanted = asked[kind] if kind in asked else (prompt(draw), values(draw))
    outputs = llm.stream(what, wanted)
    if kind == "never read":
        ends[kind] += 1
    else:
        streams.append(Stream(kind, outputs, Reading(wanted), draw.randint(1, 40)))


def _read(stream: Stream, canary: str) -> bool:
    """One more item; whether that was the end, as which it is looked at."""
    output = next(stream.outputs, None)
    if output is not None:
        stream.reading.take(output)
        stream.items -= 1
        return stream.kind == "left" and stream.items == 0
    if stream.kind == "all banned":
        stream.reading.ended("error")
    else:
        last = stream.reading.ended("stop", "length")
        if stream.kind == "canary" and last.outputs[0].text != canary:
            raise AssertionError(f"the canary's text has changed: {last.outputs[0].text!r} was {canary!r}")
    return True
