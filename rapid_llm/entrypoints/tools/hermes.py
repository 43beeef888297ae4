"""The format of Hermes 2 and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one for each call."""

from rapid_llm.entrypoints.tools.call_parser import BLANK, ObjectReader
from rapid_llm.entrypoints.tools.marked_text import MarkedParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(MarkedParser):
    """Reads the format. A call whose closing tag is missing is a call all the same."""

    marker = OPEN

    def _enter(self, before: str) -> None:
        self._reader: ObjectReader | None = ObjectReader(self, before)
        self._tail = ""  # behind the object: blanks, then a part of the closing tag

    def _take_in_call(self, char: str) -> None:
        if self._reader is not None:
            ended = self._reader.take(char)
            if ended is None:
                self.leave(char)
            elif ended:
                self._reader = None
            return
        tail = self._tail + char
        if tail.lstrip(BLANK) == CLOSE:
            self.leave()
        elif CLOSE.startswith(tail.lstrip(BLANK)):
            self._tail = tail
        else:
            self.leave(tail)

    def _end_in_call(self) -> None:
        if self._reader is not None:
            self._reader.give_up()
        elif self._tail.strip(BLANK):
            self.say(self._tail)
        self._behind_call = True
