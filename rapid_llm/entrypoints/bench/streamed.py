"""One answer that came as a stream, and when its parts came."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Streamed:
    """One stream. Times are seconds of time.perf_counter.

    Attributes:
        asked: when its request was sent.
        due: when it was to be sent; earlier than ``asked`` where all places were taken.
        arrivals: when each part with new text came.
        ended: when its last byte came; 0 before.
        status: of the answer; 0 where none came.
        prompt_tokens, completion_tokens: as the server counted them; None where it does not tell.
        text: what the parts said, where it was to be kept.
        error: what went wrong; empty where the answer is whole.
        is_cut: whether the end of the run broke it off.
    """

    asked: float
    due: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    text: str = ""
    error: str = ""
    is_cut: bool = False

    @property
    def tokens(self) -> int:
        """New tokens; parts where the server does not count them."""
        return len(self.arrivals) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None where none came."""
        return self.arrivals[0] - self.asked if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there is no second."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if self.arrivals and self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one part and the next."""
        return [later - sooner for sooner, later in pairwise(self.arrivals)]

    @property
    def latency(self) -> float:
        """Seconds to the last byte."""
        return self.ended - self.asked
