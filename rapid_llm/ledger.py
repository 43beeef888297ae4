"""The start-up ledger: what each second between exec and the first token went to. Torch-free."""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase, in seconds since the ledger's zero; phases of other threads overlap the main one's."""

    name: str
    start: float
    end: float
    thread: str


class StartupLedger:
    """Records phases against one clock whose zero is the start of the process.

    Origin: this repo. The process start comes from the kernel (10 ms steps); elsewhere zero is the ledger's construction.
    """

    def __init__(self, zero: float | None = None) -> None:
        self.zero = process_start() if zero is None else zero
        self.phases: list[Phase] = []
        self.notes: list[str] = []
        self.first_token: float | None = None
        self._doing: dict[str, str] = {}
        self._add("interpreter and command line", 0.0, self.now())

    def now(self) -> float:
        """Seconds since zero."""
        return time.time() - self.zero

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside as ``name``."""
        start, thread = self.now(), threading.current_thread().name
        before, self._doing[thread] = self._doing.get(thread, ""), name
        try:
            yield
        finally:
            self._doing[thread] = before
            self._add(name, start, self.now())

    @property
    def doing(self) -> str:
        """The phase that the calling thread is in; empty between two."""
        return self._doing.get(threading.current_thread().name, "")

    def mark_first_token(self) -> None:
        """Note the first token, once."""
        if self.first_token is None:
            self.first_token = self.now()

    def note(self, line: str) -> None:
        """Add a line about the start that is no phase: what was loaded, how large the pool is."""
        self.notes.append(line)

    def include(self, other: str, zero: float, phases: Iterable[Phase], notes: Iterable[str]) -> None:
        """Add what a process called ``other`` noted against its own ``zero``, in Unix seconds."""
        shift = zero - self.zero
        self.phases += [Phase(phase.name, phase.start + shift, phase.end + shift, other) for phase in phases]
        self.notes += notes

    def accounted(self) -> float:
        """Share of the time to the first token (or to now) that at least one phase covers."""
        until = self.first_token or self.now()
        covered, reached = 0.0, 0.0
        for phase in sorted(self.phases, key=lambda phase: phase.start):
            start, end = max(phase.start, reached), min(phase.end, until)
            if end > start:
                covered += end - start
            reached = max(reached, end)
        return covered / until if until > 0 else 1.0

    def to_text(self) -> str:
        """A table of the phases in order of their start, and the total."""
        lines = ["start-up            from     to   took  (seconds since exec)"]
        for phase in sorted(self.phases, key=lambda phase: phase.start):
            where = "" if phase.thread == "MainThread" else f"  [{phase.thread}]"
            lines.append(f"  {phase.name:<32} {phase.start:6.2f} {phase.end:6.2f} {phase.end - phase.start:6.2f}{where}")
        lines += [f"  {note}" for note in self.notes]
        if self.first_token is not None:
            lines.append(f"  first token after {self.first_token:.2f} s, {100 * self.accounted():.0f} % of it accounted for")
        return "\n".join(lines)

    def _add(self, name: str, start: float, end: float) -> None:
        self.phases.append(Phase(name, start, end, threading.current_thread().name))


def process_start() -> float:
    """Unix time at which this process started, in seconds; now where the system does not tell."""
    try:
        with (
            open("/proc/self/stat", encoding="ascii", errors="replace") as stat,
            open("/proc/uptime", encoding="ascii") as uptime,
        ):
            started_ticks = int(stat.read().rpartition(")")[2].split()[19])
            up_seconds = float(uptime.read().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - max(0.0, up_seconds - started_ticks / os.sysconf("SC_CLK_TCK"))
