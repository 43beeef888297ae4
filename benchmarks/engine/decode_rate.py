"""Decode speed of any engine, measured in one way: a whole run less the same prompts with one new id each."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.record import summary

PROMPT, NEW, RUNS = 128, 128, 3
VOCABULARY = 100_000  # below that of every model here
Prompts = Sequence[Sequence[int]]


def decode_rate(seconds: Callable[[Prompts, int], float], batch: int) -> dict[str, Any]:
    """Tokens/s of all sequences together and ms a step; ``seconds`` is the time of prompts with so many new ids each."""
    draw = random.Random(batch)
    rates, steps = [], []
    for run in range(RUNS + 1):
        prompts = [[draw.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(batch)]
        prompts_alone = seconds(prompts, 1)
        took = seconds([[*prompt[1:], prompt[0]] for prompt in prompts], NEW + 1) - prompts_alone
        if run:  # the first is the warm-up
            rates.append(batch * NEW / took)
            steps.append(1e3 * took / NEW)
    return {"tokens/s": summary(rates), "ms a step": summary(steps)}
