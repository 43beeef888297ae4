"""What a run comes to: latencies with their percentiles, throughput, goodput, and what failed."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rapid_llm.entrypoints.bench.running import Run
from rapid_llm.entrypoints.bench.settings import Load
from rapid_llm.entrypoints.bench.streamed import Streamed

PERCENTILES = (50, 90, 95, 99)
_SLICES = 60
"""Of the run's time, in which throughput is told."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that ``share`` of 0 to 1 of sorted values lie below; between two of them on the line from one to the other."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, standard deviation, smallest, percentiles and largest; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    shares = {f"p{each}": percentile(ordered, each / 100) for each in PERCENTILES}
    return {
        "count": len(ordered), "mean": statistics.fmean(ordered), "stdev": statistics.pstdev(ordered),
        "min": ordered[0], **shares, "max": ordered[-1],
    }  # fmt: skip


def latencies(run: Run) -> dict[str, list[float]]:
    """Milliseconds by name, of the answers that are whole: a value an answer, but of the gaps, which are one list."""
    whole = whole_of(run)
    seconds = {
        "ttft": [each.ttft for each in whole if each.ttft is not None],
        "tpot": [each.tpot for each in whole if each.tpot is not None],
        "gap": [gap for each in whole for gap in each.gaps],
        "latency": [each.latency for each in whole],
    }
    if math.isfinite(run.load.rate):
        seconds["wait"] = [each.asked - each.due for each in whole]
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def summary(run: Run) -> dict[str, Any]:
    """All of it, as JSON can say it. Times are milliseconds unless their name says seconds."""
    load, whole = run.load, whole_of(run)
    failed = [each for each in run.streams if each.error]
    tokens, prompts = sum(each.tokens for each in whole), [each.prompt_tokens for each in whole]
    counted = sum(each.completion_tokens is not None for each in whole)
    result: dict[str, Any] = {
        "requests": {
            "wanted": load.requests, "sent": len(run.streams), "whole": len(whole), "failed": len(failed),
            "cut": sum(each.is_cut for each in run.streams), "without_text": sum(not each.arrivals for each in whole),
        },
        "errors": [{"count": count, "words": words} for words, count in Counter(each.error for each in failed).most_common()],
        "seconds": run.seconds,
        "tokens_counted_by": "usage" if counted == len(whole) else "chunks" if not counted else "usage or chunks",
        "prompt_tokens": None if None in prompts else sum(filter(None, prompts)),
        "completion_tokens": tokens,
        "throughput": {"requests_per_second": len(whole) / run.seconds, "tokens_per_second": tokens / run.seconds},
        "milliseconds": {name: spread(values) for name, values in latencies(run).items()},
        "tokens_per_second_over_time": over_time(run),
    }  # fmt: skip
    if result["prompt_tokens"] is not None:
        result["throughput"]["total_tokens_per_second"] = (result["prompt_tokens"] + tokens) / run.seconds
    if load.goodput:
        good = sum(_is_good(each, load) for each in whole)
        share = good / len(run.streams) if run.streams else 0.0
        result["goodput"] = {
            "limits": dict(load.goodput), "requests": good, "share": share, "requests_per_second": good / run.seconds
        }  # fmt: skip
    return result


def whole_of(run: Run) -> list[Streamed]:
    """Answers that came to their end without an error."""
    return [each for each in run.streams if not each.error and not each.is_cut]


def over_time(run: Run) -> list[tuple[float, float]]:
    """Seconds from the beginning, in the middle of each slice of the run, and tokens a second in it.

    An answer's tokens are shared out evenly among its parts; those of answers that failed or were cut count too.
    """
    if run.seconds <= 0:
        return []
    width, sums = run.seconds / _SLICES, [0.0] * _SLICES
    for each in run.streams:
        for at in each.arrivals:
            sums[min(int((at - run.began) / width), _SLICES - 1)] += each.tokens / len(each.arrivals)
    edges = [number * width for number in range(_SLICES + 1)]
    return [((start + end) / 2, count / width) for (start, end), count in zip(pairwise(edges), sums, strict=True)]


def _is_good(each: Streamed, load: Load) -> bool:
    took = {"ttft": each.ttft, "tpot": each.tpot or 0.0, "latency": each.latency}
    return all((value := took[name]) is not None and 1e3 * value <= limit for name, limit in load.goodput.items())
