"""Ids to text as they come: never a part of a character, and joined the same text as decoding everything at once."""

import codecs
from collections.abc import Iterable

from rapid_llm.engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one growing sequence. The work for a token does not grow with the sequence: at most three bytes wait.

    Args:
        tokenizer: the model's.
        skip_special_tokens: leave special tokens out of the text.
        continues: whether the sequence goes on from a text before it, so that a space at its beginning is part of it. At the
            beginning of a text some decoders drop it, since their encoders put it there.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_spaces = self._spaces_to_drop = 0 if continues else tokenizer.leading_spaces

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete; may be empty while a character is open."""
        data = self._tokenizer.bytes_of(ids, skip_special_tokens=self._skip)
        return self._without_leading_spaces(self._characters.decode(data))

    def finish(self) -> str:
        """The rest: U+FFFD where the sequence ended inside a character, else nothing. Ready for another sequence afterwards."""
        text = self._without_leading_spaces(self._characters.decode(b"", final=True))
        self._characters.reset()
        self._spaces_to_drop = self._leading_spaces
        return text

    def _without_leading_spaces(self, text: str) -> str:
        while self._spaces_to_drop and text:
            if text[0] != " ":
                self._spaces_to_drop = 0
                break
            text, self._spaces_to_drop = text[1:], self._spaces_to_drop - 1
        return text
