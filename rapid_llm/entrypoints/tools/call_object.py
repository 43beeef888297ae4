"""A call as a JSON object, {"name": ..., "arguments": {...}}, read character by character as it is written."""

import json
from enum import Enum

ARGUMENT_KEYS = ("arguments", "parameters")
_BLANK = " \t\n\r"
_IN_SCALAR = frozenset("-+.0123456789abcdefghijklmnopqrstuvwxyzE")


class State(Enum):
    """How far an object has come."""

    OPEN = "more is to come"
    DONE = "its last brace was read"
    BROKEN = "this is no call"


class JsonValue:
    """Finds the end of a JSON value: brackets and strings are followed, what is inside a bracket is not checked otherwise."""

    def __init__(self) -> None:
        self.text = ""
        self._closers: list[str] = []
        self._in_string = self._escaped = False

    def take(self, char: str) -> bool | None:
        """Take a character: True when it ends the value, None when the value ended before it or cannot go on with it."""
        if self._in_string:
            self.text += char
            self._in_string = self._escaped or char != '"'
            self._escaped = not self._escaped and char == "\\"
            return not self._in_string and not self._closers
        if char == '"' and (self._closers or not self.text):
            self._in_string = True
        elif char in "{[" and (self._closers or not self.text):
            self._closers.append("}" if char == "{" else "]")
        elif char in "}]":
            if not self._closers or self._closers.pop() != char:
                return None
        elif not self._fits(char):
            return None
        self.text += char
        return char in "}]" and not self._closers

    @property
    def is_scalar(self) -> bool:
        """Whether it is a number or a word, whose end only what follows shows."""
        return bool(self.text) and self.text[0] in _IN_SCALAR

    def _fits(self, char: str) -> bool:
        """Whether a character outside of strings may stand here: between brackets anything that JSON writes there."""
        return char in _IN_SCALAR or (bool(self._closers) and (char in _BLANK or char in ",:"))


class CallObject:
    """One call.

    Attributes:
        state: how far it has come.
        name: the tool's, once it is known.
        arguments: JSON text of them, as far as it may be told: all of it once the object is done.
        text: everything that was taken.
        tail: of it, what stands behind the last whole value once this is known to be a call.
    """

    def __init__(self) -> None:
        self.state = State.OPEN
        self.name: str | None = None
        self.arguments = self.text = self.tail = ""
        self._wants = "{"
        self._key = ""
        self._value = JsonValue()
        self._has_arguments = False

    @property
    def is_started(self) -> bool:
        """Whether it is sure that this is a call: name and arguments have begun."""
        return self.name is not None and self._has_arguments

    def take(self, char: str) -> bool:
        """Take a character; False when the object is broken by it, which then is no part of it."""
        was_in_value = self._wants == "value"
        if was_in_value and self._value.text:
            taken = self._in_value(char)
        elif char in _BLANK and self._wants != "in key":
            taken, self.text = True, self.text + char
        else:
            taken = self._step(char)
        is_in_value = self._wants == "value"
        is_told = (was_in_value and not is_in_value) or (self._key in ARGUMENT_KEYS and is_in_value)
        if taken and self.is_started and not is_told:
            self.tail += char
        return taken

    def _step(self, char: str) -> bool:
        match self._wants, char:
            case "{", "{":
                self._wants = "first key"
            case "first key" | "key", '"':
                self._value, self._wants = JsonValue(), "in key"
                self._value.take(char)
            case "in key", _:
                if self._value.take(char):
                    return self._end_key(char)
            case ":", ":":
                self._value, self._wants = JsonValue(), "value"
            case "value", _:
                return self._in_value(char)
            case ",", ",":
                self._wants = "key"
            case ",", "}":
                if not self.is_started:
                    return self._break()
                self.state = State.DONE
            case _:
                return self._break()
        self.text += char
        return True

    def _end_key(self, char: str) -> bool:
        key = _string(self._value.text)
        if key is None or (key in ARGUMENT_KEYS and self._has_arguments) or (key == "name" and self.name is not None):
            return self._break()
        self._key, self._wants = key, ":"
        self.text += char
        return True

    def _in_value(self, char: str) -> bool:
        ended = self._value.take(char)
        if ended is None:
            if not self._value.is_scalar or not (char in _BLANK or char in ",}"):
                return self._break()
            return self._end_value() and self.take(char)
        if self._key in ARGUMENT_KEYS and self._value.text[0] == "{":
            self._has_arguments, self.arguments = True, self._value.text
        if ended and not self._end_value():
            return False
        self.text += char
        return True

    def _end_value(self) -> bool:
        self._wants, self.tail = ",", ""
        if self._key == "name":
            self.name = _string(self._value.text)
            if not self.name:
                return self._break()
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            written = _string(self._value.text)  # some models write the JSON of their arguments as a string
            self.arguments = self._value.text if written is None else written
            if self.arguments in ("", "null"):
                self.arguments = "{}"
        return True

    def _break(self) -> bool:
        self.state = State.BROKEN
        return False


def _string(text: str) -> str | None:
    """What a JSON string says; None where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
