"""Llama 3's format: the whole answer is {"name": ..., "parameters": {...}}, behind <|python_tag|> or not.

Several stand behind one another, or behind semicolons.
"""

from rapid_llm.entrypoints.tools.call_parser import BLANK, CallParser, ObjectReader

PYTHON_TAG = "<|python_tag|>"


class Llama3Parser(CallParser):
    """Reads the format. An answer that does not begin with a call of a tool is content, whatever it holds: JSON is no call.

    Args:
        names: the tools that may be called.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._held = ""  # before an object: blanks, semicolons, a part of the tag
        self._reader: ObjectReader | None = None
        self._is_content = False

    def _take(self, char: str) -> None:
        if self._is_content:
            self.say(char)
        elif self._reader is not None:
            ended = self._reader.take(char)
            if ended is not False:
                self._reader = None
            if ended is None:
                self._is_content = True
                self.say(char)
        else:
            self._take_between(char)

    def _take_between(self, char: str) -> None:
        held = self._held + char
        part = held.lstrip(BLANK + ";" if self.num_calls else BLANK)
        if part.startswith(PYTHON_TAG):
            part = part[len(PYTHON_TAG) :].lstrip(BLANK)
        elif part and PYTHON_TAG.startswith(part):
            part = ""
        if not part:
            self._held = held
        elif part == "{":
            self._reader, self._held = ObjectReader(self, self._held, self._names), ""
            self._reader.take(char)
        else:
            self._is_content, self._held = True, ""
            self.say(held)

    def _end(self) -> None:
        if self._reader is not None:
            self._reader.give_up()
        elif self._held.strip(BLANK + ";") or not self.num_calls:
            self.say(self._held)
