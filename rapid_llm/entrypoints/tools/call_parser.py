"""What the parsers of all formats share: text in, events out, and a call told as it is written."""

from rapid_llm.entrypoints.tools.call_object import CallObject, State
from rapid_llm.entrypoints.tools.events import CallArguments, CallStart, Content, Event, joined

BLANK = " \t\n\r"


class CallParser:
    """Base of the parsers: they say what one character means, and what the end does.

    Attributes:
        num_calls: calls that were told so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._events: list[Event] = []
        self._told = 0  # characters of the newest call's arguments

    def feed(self, text: str) -> list[Event]:
        """Take more text."""
        for char in text:
            self._take(char)
        return self._news()

    def finish(self) -> list[Event]:
        """There is no more: tell what was held back."""
        self._end()
        return self._news()

    def _take(self, char: str) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _news(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def say(self, text: str) -> None:
        """Tell content."""
        if text:
            self._events.append(Content(text))

    def begin_call(self, name: str) -> None:
        """Tell that a call of this tool begins."""
        self._events.append(CallStart(self.num_calls, name))
        self.num_calls, self._told = self.num_calls + 1, 0

    def tell_arguments(self, arguments: str) -> None:
        """``arguments`` as far as they are known; what is new of them is told."""
        if len(arguments) > self._told:
            self._events.append(CallArguments(self.num_calls - 1, arguments[self._told :]))
            self._told = len(arguments)


class ObjectReader:
    """Reads one call object for a parser.

    Args:
        parser: what the call is told by.
        before: text that led to the object, which is content if it is no call.
        names: tools that may be called; None takes any name.
    """

    def __init__(self, parser: CallParser, before: str, names: frozenset[str] | None = None) -> None:
        self._parser, self._before, self._names = parser, before, names
        self._object = CallObject()
        self._is_told = False

    def take(self, char: str) -> bool | None:
        """Take a character: True when it ends the call, None when it is not part of it, which the parser then goes on with."""
        call, parser = self._object, self._parser
        if not call.take(char):
            self.give_up()
            return None
        if call.is_started and not self._is_told:
            if self._names is not None and call.name not in self._names:
                parser.say(self._before + call.text[:-1])
                return None
            parser.begin_call(call.name or "")
            self._is_told = True
        if self._is_told:
            parser.tell_arguments(call.arguments)
        return call.state is State.DONE

    def give_up(self) -> None:
        """Say what was taken and is no part of a call."""
        self._parser.say(self._object.tail if self._is_told else self._before + self._object.text)
