"""Traffic of every kind in miniature, seeded: what is asked of an engine, and what must hold when all of it is over.

    python -m tests.soak [--requests 20000] [--seed 0]      (make soak)

tests/e2e/test_soak.py runs some of it in every `make test`.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from rapid_llm import AsyncLLM, RequestError, SamplingParams
from rapid_llm.engine.output import RequestOutput
from tests.tiny_model import save_checkpoint, tiny_llama

CANARY, CANARY_PARAMS = "the canary", SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
AT_ONCE = 24
SHARED = "a beginning that many have in common, longer than a page. "
OPTIONS = {"device": "cpu", "max_kv_tokens": 768, "max_num_seqs": 16, "max_batched_tokens": 96}  # small: some give way
"""Of the engine."""


def values(draw: random.Random) -> SamplingParams:
    """Sampling values of any kind."""
    given = {"max_tokens": draw.randint(1, 24), "ignore_eos": draw.random() < 0.7}
    kinds = [
        {"temperature": 0.0},
        {"temperature": draw.uniform(0.1, 2.0), "top_p": draw.uniform(0.1, 1.0), "seed": draw.randrange(100)},
        {"top_k": draw.randint(1, 300), "min_p": draw.random() / 2},
        {"n": draw.randint(2, 3), "seed": draw.randrange(100)},
        {"stop": [draw.choice("aeiou13"), "zz"]},
        {"stop_token_ids": [draw.randrange(256)]},
        {"logprobs": draw.randint(0, 5)},
        {"prompt_logprobs": draw.randint(0, 3)},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"logit_bias": {draw.randrange(256): draw.choice([-100, -5, 5])}, "bad_words": ["ab", "q"]},
        {"min_tokens": 1},
    ]
    for kind in draw.sample(kinds, draw.randint(1, 3)):
        given |= kind
    return SamplingParams(**given)


def prompt_of(draw: random.Random) -> str | list[int]:
    """Short, long, ids, and beginnings that others have too."""
    tail = "".join(draw.choice("abc de fg") for _ in range(draw.choice((1, 3, 15, 16, 17, 60, 120))))
    return draw.choice((tail, SHARED + tail, [draw.randrange(256) for _ in range(draw.randint(1, 90))]))


async def last(outputs: AsyncIterator[RequestOutput], turns: int = 0) -> RequestOutput:
    """Read to the end; a slow reader is busy for some turns of the loop after each output."""
    end = None
    async for output in outputs:
        end = output
        for _ in range(turns):
            await asyncio.sleep(0)
    if end is None:
        raise AssertionError("a stream ended without an output")
    return end


async def answered(llm: AsyncLLM, draw: random.Random) -> str:
    """Read to the end, now and then slowly."""
    output = await last(llm.generate(prompt_of(draw), values(draw)), draw.choice((0, 0, 0, 20)))
    if not output.finished or any(answer.finish_reason not in ("stop", "length") for answer in output.outputs):
        raise AssertionError(f"an answer did not end as it should: {output}")
    return "answered"


async def chatted(llm: AsyncLLM, draw: random.Random) -> str:
    """A conversation."""
    output = await last(llm.chat([{"role": "user", "content": "hello " * draw.randint(1, 12)}], values(draw)))
    return "answered" if output.finished else "lost"


async def abandoned(llm: AsyncLLM, draw: random.Random) -> str:
    """Leave after the first output."""
    async with aclosing(llm.generate(prompt_of(draw), SamplingParams(max_tokens=60, ignore_eos=True))) as outputs:
        async for _ in outputs:
            break
    return "abandoned"


async def cancelled(llm: AsyncLLM, draw: random.Random) -> str:
    """The reader's task is cancelled, sometimes before it has begun."""
    task = asyncio.create_task(answered(llm, draw))
    for _ in range(draw.randrange(30)):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    return "cancelled"


async def aborted(llm: AsyncLLM, draw: random.Random, name: str) -> str:
    """Ended by name; the stream says so."""
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
    reasons = []
    async for output in llm.generate("abort me", params, request_id=name):
        llm.abort(name)
        reasons.append(output.outputs[0].finish_reason)
    return "aborted" if reasons[-1] == "abort" else "lost"


async def refused(llm: AsyncLLM, draw: random.Random) -> str:
    """Something that cannot be served."""
    wrong = [
        lambda: llm.generate("", SamplingParams()),
        lambda: llm.generate([999], SamplingParams()),
        lambda: llm.generate("x" * 5000, SamplingParams()),
        lambda: llm.generate("x", SamplingParams(max_tokens=10_000)),
        lambda: llm.generate("x", SamplingParams(logit_bias={4000: 1.0})),
        lambda: llm.generate("x", SamplingParams(temperature=-1)),
        lambda: llm.generate(3.5),
        lambda: llm.chat([{"role": 7}]),
    ]
    try:
        async for _ in draw.choice(wrong)():
            raise AssertionError("what cannot be served was")
    except RequestError:
        return "refused"
    return "lost"


async def run(folder: str, requests: int, seed: int) -> Counter:
    """All of it, AT_ONCE at a time; how each ended. Raises AssertionError where anything is lost, changed or left behind."""
    draw, ends, room = random.Random(seed), Counter(), asyncio.Semaphore(AT_ONCE)
    kinds = [answered] * 12 + [chatted] * 2 + [abandoned, cancelled, refused]
    async with AsyncLLM(folder, **OPTIONS) as llm:
        canary = await canary_text(llm)

        async def one(number: int) -> None:
            async with room:
                own = random.Random(f"{seed}/{number}")
                if number % 17 == 0:
                    ends[await aborted(llm, own, f"named {number}")] += 1
                elif number % 25 == 1:
                    text = await canary_text(llm)
                    ends["canary" if text == canary else "lost"] += 1
                else:
                    ends[await draw.choice(kinds)(llm, own)] += 1

        await asyncio.gather(*(one(number) for number in range(requests)))
        left = await llm.stats()
        if await canary_text(llm) != canary:
            raise AssertionError("the canary's text has changed")
        open_streams = len(llm._open)
    if ends["lost"] or sum(ends.values()) != requests:
        raise AssertionError(f"not every request was answered or refused once: {dict(ends)} of {requests}")
    if (left.waiting, left.running, left.used_pages, open_streams) != (0, 0, 0, 0):
        raise AssertionError(f"something is left behind: {left}, {open_streams} streams")
    return ends


async def canary_text(llm: AsyncLLM) -> str:
    """What the canary says, which hangs on nobody else."""
    return (await last(llm.generate(CANARY, CANARY_PARAMS))).outputs[0].text


def main() -> None:
    """Run, and say how the requests ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = save_checkpoint(tiny_llama(), Path(name))
        sys.stdout.write(f"{dict(asyncio.run(run(str(folder), options.requests, options.seed)))}\n")


if __name__ == "__main__":
    main()
