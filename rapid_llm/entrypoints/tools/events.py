"""The pieces that an answer's text is told in, as it streams."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; ``index`` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: a piece of JSON text."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Takes an answer's text in pieces, however it is cut, and tells what it holds.

    Whatever the cuts, the events add up to the same; text that is no whole call comes out as content.
    """

    def feed(self, text: str) -> list[Event]:
        """Take more text."""

    def finish(self) -> list[Event]:
        """There is no more: tell what was held back."""


def joined(events: list[Event]) -> list[Event]:
    """The same events with neighbours of one kind (and of one call) put together."""
    result: list[Event] = []
    for event in events:
        match result[-1] if result else None, event:
            case Content(before), Content(text):
                result[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                result[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                result[-1] = CallArguments(index, before + text)
            case _:
                result.append(event)
    return result
