"""Text in which calls begin behind a marker: the marker, and blanks in front of it, are held back while they may still be one."""

from rapid_llm.entrypoints.tools.call_parser import BLANK, CallParser


class MarkedParser(CallParser):
    """Base of formats whose calls stand behind a marker, anywhere in the text.

    Blanks right before a marker, and behind the last call, are left out.

    Attributes:
        marker: what calls begin with; its first character stands nowhere else in it.
    """

    marker = ""

    def __init__(self) -> None:
        super().__init__()
        self._blank = self._part = ""  # held back: blanks, then the beginning of a marker
        self._in_call = False
        self._behind_call = False

    def _take(self, char: str) -> None:
        if self._in_call:
            self._take_in_call(char)
        else:
            self._take_text(char)

    def _take_text(self, char: str) -> None:
        part = self._part + char
        if part == self.marker:
            before, self._blank, self._part, self._in_call = self._blank + part, "", "", True
            self._enter(before)
        elif self.marker.startswith(part):
            self._part = part
        else:
            if self._part:
                self._let_go()
            if char in BLANK:
                self._blank += char
            elif self.marker.startswith(char):
                self._part = char
            else:
                self._part = char
                self._let_go()

    def _let_go(self) -> None:
        """What was held back is content."""
        self.say(self._blank + self._part)
        self._blank = self._part = ""
        self._behind_call = False

    def leave(self, rest: str = "") -> None:
        """The call is over; ``rest`` is text again."""
        self._in_call, self._behind_call = False, self.num_calls > 0
        for char in rest:
            self._take(char)

    def _end(self) -> None:
        if self._in_call:
            self._end_in_call()
        if self._part or not self._behind_call:
            self._let_go()

    def _enter(self, before: str) -> None:
        """A marker was read; ``before`` is it, with the blanks in front."""
        raise NotImplementedError

    def _take_in_call(self, char: str) -> None:
        raise NotImplementedError

    def _end_in_call(self) -> None:
        raise NotImplementedError
