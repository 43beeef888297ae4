"""Reasoning: what a model writes between <think> and </think> before its answer."""

from rapid_llm.entrypoints.tools.call_parser import BLANK
from rapid_llm.entrypoints.tools.events import Content, Event, Parser, Reasoning, joined

OPEN, CLOSE = "<think>", "</think>"


def marks_reasoning(template: str | None) -> bool:
    """Whether a model with this chat template writes reasoning between these marks."""
    return template is not None and CLOSE in template


def begins_inside(prompt: str) -> bool:
    """Whether a rendered prompt leaves the model inside its reasoning."""
    return prompt.rstrip(BLANK).endswith(OPEN)


class ReasoningParser:
    """Tells the reasoning apart, and hands what follows it on to another parser.

    Only the beginning of an answer is reasoning. Blanks around it are left out. Reasoning that never ends is all there is.

    Args:
        inner: reads the rest; None takes it as content.
        inside: whether the prompt has opened the reasoning already.
    """

    def __init__(self, inner: Parser | None = None, *, inside: bool = False) -> None:
        self._inner = inner
        self._state = "inside" if inside else "before"
        self._held = ""  # blanks and parts of marks
        self._has_said = False

    def feed(self, text: str) -> list[Event]:
        """Take more text."""
        events: list[Event] = []
        for place, char in enumerate(text):
            if self._state == "behind":
                return joined(events + self._pass_on(text[place:]))
            events += self._take(char)
        return joined(events)

    def finish(self) -> list[Event]:
        """There is no more: tell what was held back."""
        held, self._held = self._held, ""
        events: list[Event] = []
        if self._state == "before":
            events = self._pass_on(held)
        elif self._state == "inside" and held.strip(BLANK):
            events = [Reasoning(held if self._has_said else held.lstrip(BLANK))]
        return joined(events + (self._inner.finish() if self._inner is not None else []))

    def _take(self, char: str) -> list[Event]:
        held = self._held + char
        if self._state == "before":
            return self._take_before(held)
        if self._state == "inside":
            return self._take_inside(held)
        return self._take_after(held)

    def _take_before(self, held: str) -> list[Event]:
        self._held = held
        part = held.lstrip(BLANK)
        if part == OPEN:
            self._state, self._held = "inside", ""
        elif not OPEN.startswith(part):
            self._state, self._held = "behind", ""
            return self._pass_on(held)
        return []

    def _take_inside(self, held: str) -> list[Event]:
        if held.endswith(CLOSE):
            self._state, self._held = "after", ""
            said = held[: -len(CLOSE)].rstrip(BLANK)
        else:
            kept = next((size for size in range(len(CLOSE), 0, -1) if held.endswith(CLOSE[:size])), 0)
            said = held[: len(held) - kept].rstrip(BLANK)
            self._held = held[len(said) :]
        said = said if self._has_said else said.lstrip(BLANK)
        self._has_said = self._has_said or bool(said)
        return [Reasoning(said)] if said else []

    def _take_after(self, held: str) -> list[Event]:
        """Blanks behind the reasoning are left out."""
        if not held.strip(BLANK):
            return []
        self._state = "behind"
        return self._pass_on(held)

    def _pass_on(self, text: str) -> list[Event]:
        if self._inner is not None:
            return self._inner.feed(text)
        return [Content(text)] if text else []
