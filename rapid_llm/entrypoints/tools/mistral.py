"""Mistral's formats: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and [TOOL_CALLS]name[ARGS]{...} for each call.

The second is that of version 11 on; some leave the [ARGS] out.
"""

import re

from rapid_llm.entrypoints.tools.call_object import JsonValue
from rapid_llm.entrypoints.tools.call_parser import BLANK, ObjectReader
from rapid_llm.entrypoints.tools.marked_text import MarkedParser

OPEN, ARGS = "[TOOL_CALLS]", "[ARGS]"
_HEADER = re.compile(r"\s*([\w.-]+)\s*(\[CALL_ID\][\w-]*)?\s*(\[ARGS\])?\s*")
_IN_HEADER = re.compile(r"[\w.\-\[\]\s]")
_LONGEST_HEADER = 256


class MistralParser(MarkedParser):
    """Reads both formats, whichever comes."""

    marker = OPEN

    def _enter(self, before: str) -> None:
        self._before, self._header = before, ""
        self._reader: ObjectReader | None = None
        self._arguments: JsonValue | None = None
        self._in_list = False

    def _take_in_call(self, char: str) -> None:
        if self._reader is not None:
            self._read_object(self._reader, char)
        elif self._arguments is not None:
            self._read_arguments(self._arguments, char)
        elif self._in_list:
            self._read_between(char)
        else:
            self._read_header(char)

    def _read_header(self, char: str) -> None:
        """What stands behind the marker: a list, or a name."""
        if char == "[" and not self._header.strip(BLANK):
            self._in_list = True
            self._reader = ObjectReader(self, self._before + self._header + char)
            return
        header = _HEADER.fullmatch(self._header) if char == "{" else None
        if header is not None:
            self.begin_call(header[1])
            self._arguments = JsonValue()
            self._read_arguments(self._arguments, char)
        elif _IN_HEADER.match(char) and len(self._header) < _LONGEST_HEADER:
            self._header += char
        else:
            self.say(self._before + self._header)
            self.leave(char)

    def _read_arguments(self, value: JsonValue, char: str) -> None:
        ended = value.take(char)
        self.tell_arguments(value.text)
        if ended is not False:
            self.leave("" if ended else char)

    def _read_object(self, reader: ObjectReader, char: str) -> None:
        ended = reader.take(char)
        if ended is None:
            self.leave(char)
        elif ended:
            self._reader, self._header = None, ""

    def _read_between(self, char: str) -> None:
        """Behind an object of the list."""
        if char == "]":
            self.leave()
        elif (char == "," and "," not in self._header) or char in BLANK:
            self._header += char
        elif char == "{" and "," in self._header:
            self._reader = ObjectReader(self, self._header)
            self._read_object(self._reader, char)
        else:
            self.leave(self._header + char)

    def _end_in_call(self) -> None:
        if self._reader is not None:
            self._reader.give_up()
        elif self._in_list:
            self.say("" if not self._header.strip(BLANK) else self._header)
        elif self._arguments is None:
            self.say(self._before + self._header)
        self._behind_call = True
