"""How long a step will take, learned from the steps that were measured: what a prefill chunk may cost those who decode beside it.

seconds ~ a + b * tokens + c * (pairs of a query and a key in prefill chunks) + d * (KV rows that decodes read)

Least squares of the residuals over the root of the time: a step a hundred times too slow (another program, a first call) does not
even double it. Steps with and without prefill chunks are forgotten each at their own pace: a long answer does not wash out what
prompts cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rapid_llm.step import Chunk

_FORGET = 0.9
"""Weight that an observation keeps when the next of its kind comes: the last ten or so count."""
_RIDGE = 1e-3
"""What decides between terms that the steps so far cannot tell apart: it shares the time among them."""


@dataclass(slots=True)
class StepLoad:
    """What a step has to do.

    Attributes:
        tokens: of all chunks.
        pairs: queries times the keys each sees, over prefill chunks.
        rows: KV rows that decodes read.
    """

    tokens: int = 0
    pairs: float = 0
    rows: int = 0

    def add(self, start: int, count: int) -> None:
        """A prefill chunk of ``count`` tokens from position ``start``."""
        self.tokens += count
        self.pairs += count * start + count * (count + 1) / 2

    def add_decodes(self, decodes: Sequence[Chunk]) -> None:
        """Sequences that have one token each."""
        self.tokens += len(decodes)
        self.rows += sum([chunk.start for chunk in decodes], len(decodes))

    @property
    def terms(self) -> tuple[float, ...]:
        """What the time of a step is a sum over."""
        return 1.0, self.tokens, self.pairs, self.rows


_TERMS = len(StepLoad().terms)
_Matrix = list[list[float]]


class StepTime:
    """Predicts steps of one engine. Knows nothing at first and then bounds nothing."""

    def __init__(self) -> None:
        # Of steps with and without prefill chunks: the normal equations, with the right-hand side as the last column.
        self._sums: dict[bool, _Matrix] = {}
        self._fitted: list[float] | None = None

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step that took ``seconds``."""
        if not seconds > 0:
            return
        terms = load.terms
        zeros = [[0.0] * (_TERMS + 1) for _ in terms]
        sums = self._sums.setdefault(load.pairs > 0, zeros)
        for row, left in zip(sums, terms, strict=True):
            for j, right in enumerate((*terms, seconds)):
                row[j] = _FORGET * row[j] + left * right / seconds
        self._fitted = None

    def seconds(self, load: StepLoad) -> float:
        """What a step is expected to take; 0 before the first observation."""
        return sum(rate * term for rate, term in zip(self._rates(), load.terms, strict=True))

    def tokens_within(self, seconds: float, load: StepLoad, start: int) -> float:
        """Most tokens of a prefill chunk from position ``start`` that a step of ``load`` can take on and end within ``seconds``.

        May be infinite, as it is before the first step with a prefill chunk was observed.
        """
        if True not in self._sums or math.isinf(seconds):
            return math.inf
        left = max(seconds - self.seconds(load), 0.0)
        _, per_token, per_pair, _ = self._rates()
        linear = per_token + per_pair * (start + 0.5)
        # The positive root of per_pair / 2 * n**2 + linear * n = left, in the form that a vanishing per_pair does not upset.
        divisor = linear + math.sqrt(linear**2 + 2 * per_pair * left)
        return math.floor(2 * left / divisor) if divisor else math.inf

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
