"""How far a start is, for whoever waits for it: a bar on a terminal, elsewhere a line every few seconds."""

import sys
import time
from collections.abc import Callable

CLEAR_LINE = "\r\033[K"
PLAIN_SECONDS = 5.0
"""Between two lines where there is no terminal; a start that is faster says nothing there."""
_BAR = 24
KERNELS = "kernels"
"""The phase that counts kernels; all others count bytes."""


def amount(phase: str, done: int, total: int) -> str:
    """So much of so much, in the phase's unit."""
    return f"{done:,} of {total:,} kernels" if phase == KERNELS else f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"


class StartProgress:
    """One start. Calls may come from several threads.

    Args:
        say: takes a plain line; None writes it to standard error.
        clock: seconds.
    """

    def __init__(self, say: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say or _print, clock
        self._is_terminal = sys.stderr.isatty()
        self._phase, self._shown = "", False
        self._began = self._newest = self._told = clock()

    def note(self, phase: str, done: int, total: int, seconds: float | None = None, words: str = "") -> None:
        """A phase has begun, or has come to ``done`` of ``total`` bytes or kernels.

        Args:
            phase: its name.
            done, total: how far it is; both 0 where nothing counts it.
            seconds: what it has taken; None takes the time since the news before its first.
            words: say it better than its name.
        """
        now = self._clock()
        if phase != self._phase:  # the first news of a phase tell what was done since those before
            self._phase, self._began, self._told = phase, self._newest, now
        self._newest = now
        if seconds is not None:
            self._began = now - seconds
        if self._is_terminal:
            self._draw(words or phase, done, total)
        elif total and now - self._told >= PLAIN_SECONDS:
            self._told = now
            self._say(f"{words or phase} {self._text(done, total)}")

    def clear(self) -> None:
        """What is written next is no continuation of the bar."""
        if self._shown:
            self._shown = False
            sys.stderr.write(CLEAR_LINE)
            sys.stderr.flush()

    def _draw(self, words: str, done: int, total: int) -> None:
        if not total:
            return self.clear()
        full = _BAR * done // total
        sys.stderr.write(f"{CLEAR_LINE}{words} [{'#' * full}{'.' * (_BAR - full)}] {self._text(done, total)}")
        sys.stderr.flush()
        self._shown = True
        if done == total:
            self.clear()
        return None

    def _text(self, done: int, total: int) -> str:
        seconds = self._newest - self._began
        rate = f", {done / 1e9 / seconds:.2f} GB/s" if self._phase != KERNELS and seconds > 0 else ""
        return amount(self._phase, done, total) + rate


def _print(line: str) -> None:
    print(f"rapid-llm: {line}", file=sys.stderr)
