"""When requests come."""

import math
import random
from collections.abc import Iterator
from itertools import accumulate, islice, repeat


def poisson(rate: float, count: int, seed: int) -> Iterator[float]:
    """Seconds from the beginning at which each of ``count`` requests comes, as independent users make them.

    Args:
        rate: requests a second; inf brings all of them at 0.
        seed: the same gives the same times.
    """
    if math.isinf(rate):
        return repeat(0.0, count)
    draw = random.Random(seed)
    return islice(accumulate(draw.expovariate(rate) for _ in repeat(None)), count)
