"""How long a step will take, learned from the steps that were measured: what a prefill chunk may cost those who decode beside it.

seconds ~ a + b * tokens + c * (pairs of a query and a key in prefill chunks) + d * (KV rows that decodes read)

A step's time runs from the end of the one before it: it is the gap between two tokens of a stream. Tokens and pairs are those
that a GPU computes, padding included, so that the time has stairs, and the largest chunk within a bound fills what it pays for.

Least squares of the residuals over the root of the time: a step a hundred times too slow (another program, a first call) does not
even double it. Steps with and without prefill chunks are forgotten each at their own pace: a long answer does not wash out what
prompts cost.

A bound is for nearly all steps and not for half of them: room is kept for what predictions were off by of late, as a timer of TCP
waits for the mean and some mean deviations (Jacobson 1988, https://doi.org/10.1145/52324.52356).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rapid_llm.step import Chunk

QUERY_TILE = 128
"""Queries that attention takes together. The keys of few such tiles are split among the programs of a GPU, evenly where the tiles
are a power of two: any other number takes about as long as the next one that is."""
_FORGET = 0.9
"""Weight that an observation keeps when the next of its kind comes: the last ten or so count."""
_DEVIATIONS = 5
"""How many times the mean error fits between what a step is expected to take and its bound. Four left a p99 of 15.4 ms at a bound
of 15 on an H200."""
_RIDGE = 1e-3
"""What decides between terms that the steps so far cannot tell apart: it shares the time among them."""


@dataclass(slots=True)
class StepLoad:
    """What a step has to do.

    Attributes:
        tokens: of all chunks.
        pairs: queries, padded as attention pads them, times the keys each sees, over prefill chunks.
        rows: KV rows that decodes read.
    """

    tokens: int = 0
    pairs: float = 0
    rows: int = 0

    def add(self, start: int, count: int) -> None:
        """A chunk of ``count`` tokens from position ``start``; one token is a decode, whatever it is of."""
        self.tokens += count
        if count == 1:
            self.rows += start + 1
        else:
            queries = max(QUERY_TILE, 1 << (count - 1).bit_length())
            self.pairs += queries * start + queries * (queries + 1) / 2

    def add_decodes(self, decodes: Sequence[Chunk]) -> None:
        """Sequences that have one token each."""
        self.tokens += len(decodes)
        self.rows += sum([chunk.start for chunk in decodes], len(decodes))


_TERMS = 4
_Matrix = list[list[float]]


class StepTime:
    """Predicts steps of one engine. Knows nothing at first and then bounds nothing.

    Args:
        sizes: tokens that steps with a prefill chunk are padded to, ascending; none has more than the last.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        # Of steps with and without prefill chunks: the normal equations, with the right-hand side as the last column.
        self._sums: dict[bool, _Matrix] = {}
        self._fitted: list[float] | None = None
        self._error = 0.0  # mean of how far off predictions of steps with a chunk were, as a part of them

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step that took ``seconds``."""
        if not seconds > 0:
            return
        if load.pairs and (expected := self.seconds(load)):
            error = min(abs(seconds / expected - 1), 1.0)  # one that was very late does not cut those behind it to nothing
            self._error += (1 - _FORGET) * (error - self._error)
        terms = self._terms(load)
        zeros = [[0.0] * (_TERMS + 1) for _ in terms]
        sums = self._sums.setdefault(load.pairs > 0, zeros)
        for row, left in zip(sums, terms, strict=True):
            for j, right in enumerate((*terms, seconds)):
                row[j] = _FORGET * row[j] + left * right / seconds
        self._fitted = None

    def seconds(self, load: StepLoad) -> float:
        """What a step is expected to take; 0 before the first observation."""
        return sum(rate * term for rate, term in zip(self._rates(), self._terms(load), strict=True))

    def tokens_within(self, seconds: float, load: StepLoad, start: int, most: int) -> int:
        """Tokens of the largest chunk from position ``start`` with which a step of ``load`` nearly always ends in ``seconds``.

        Up to ``most``, which is also what it is before the first step with a prefill chunk was observed.
        """
        if True not in self._sums or math.isinf(seconds):
            return most

        def seconds_with(count: int) -> float:
            larger = replace(load)
            larger.add(start, count)
            return self.seconds(larger)

        return bisect_right(range(1, most + 1), seconds / (1 + _DEVIATIONS * self._error), key=seconds_with)

    def _terms(self, load: StepLoad) -> tuple[float, ...]:
        """What the time of a step is a sum over."""
        tokens = self._sizes[bisect_left(self._sizes, load.tokens)] if load.pairs else load.tokens
        return 1.0, tokens, load.pairs, load.rows

    def _rates(self) -> list[float]:
        if self._fitted is None:
            kinds = self._sums.values()
            self._fitted = _fit([[sum(kind[i][j] for kind in kinds) for j in range(_TERMS + 1)] for i in range(_TERMS)])
        return self._fitted


def _fit(sums: _Matrix) -> list[float]:
    """Rates >= 0 that solve the normal equations; terms that would come out negative are left out, the worst first."""
    rates = [0.0] * _TERMS
    active = [i for i in range(_TERMS) if sums[i][i] > 0]
    while active:
        scale = [math.sqrt(sums[i][i]) for i in active]
        rows = [[sums[i][j] / scale[r] / scale[c] for c, j in enumerate(active)] for r, i in enumerate(active)]
        for r, i in enumerate(active):
            rows[r][r] += _RIDGE
            rows[r].append(sums[i][-1] / scale[r])
        solved = _solve(rows)
        if min(solved) >= 0:
            for i, value, unit in zip(active, solved, scale, strict=True):
                rates[i] = value / unit
            break
        del active[solved.index(min(solved))]
    return rates


def _solve(rows: _Matrix) -> list[float]:
    """Solve a positive definite system, its right-hand side in the last column, by elimination."""
    size = len(rows)
    for pivot in range(size):
        for row in rows[pivot + 1 :]:
            factor = row[pivot] / rows[pivot][pivot]
            for j in range(pivot, size + 1):
                row[j] -= factor * rows[pivot][j]
    values = [0.0] * size
    for r in reversed(range(size)):
        known = sum(rows[r][c] * values[c] for c in range(r + 1, size))
        values[r] = (rows[r][size] - known) / rows[r][r]
    return values
