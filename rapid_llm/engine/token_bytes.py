"""Token ids to bytes: what the tokenizer's decoder would write, one token at a time.

Text is then one UTF-8 decode of the joined bytes. That makes streaming exact and cheap: a piece of a character waits as bytes in
an incremental decoder, and nothing is ever decoded twice.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer as Backend

from rapid_llm.errors import CheckpointError


class TokenBytes:
    """The bytes that each token stands for.

    Args:
        backend: the tokenizer with its decoder.
        where: the file it came from, for the error.

    Attributes:
        special_ids: tokens that ``skip_special_tokens`` leaves out.
        leading_spaces: spaces that the decoder drops at the very beginning of a text.

    Raises:
        CheckpointError: a decoder that is not of these kinds, by name.
    """

    def __init__(self, backend: Backend, where: object) -> None:
        self._backend = backend
        self._rule, self.leading_spaces = _decoder_rule(backend, where)
        self.special_ids = frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
        self._known: dict[int, bytes] = {}

    def join(self, ids: Iterable[int], *, skip_special_tokens: bool) -> bytes:
        """Bytes of all ``ids``. An id that the tokenizer does not know stands for no bytes."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join([self._of(token_id) for token_id in ids if token_id not in skipped])

    def _of(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            # The library takes 32-bit ids; a larger or negative one is as unknown as any past the vocabulary.
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            known = b"" if token is None else self._rule(token)
            if token is not None:
                self._known[token_id] = known
        return known


def _decoder_rule(backend: Backend, where: object) -> tuple[Callable[[str], bytes], int]:
    """Token -> bytes, and how many leading spaces of a text are dropped."""
    # The decoder's pickling hook is the library's one way to tell its settings; what it returns is plain JSON.
    decoder: dict[str, Any] = {"type": "none"} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = " ".join(step["type"] for step in steps)
    if kinds == "ByteLevel":
        return _byte_level, 0
    replaced = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
    stripped = [step for step in steps if step["type"] == "Strip"]
    is_plain = all(old is not None for old, _ in replaced) and all(
        step["content"] == " " and not step["stop"] for step in stripped
    )
    if is_plain and re.fullmatch(r"(Replace )*ByteFallback( Fuse( Strip)?)?", kinds):
        return _byte_fallback(replaced), sum(step["start"] for step in stripped)
    wanted = "ByteLevel, or Replace, ByteFallback, Fuse and Strip in this order"
    raise CheckpointError(
        f"{where}: the tokenizer's decoder is not supported", got=kinds, wanted=wanted, change="use another model"
    )


def _byte_level(token: str) -> bytes:
    """GPT-2's alphabet: each character is one byte. A token with any other character (an added one) is its own text."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_fallback(replaced: list[tuple[str, str]]) -> Callable[[str], bytes]:
    """SentencePiece's alphabet: pieces of text with a mark for the space, and <0xE2> for a byte that no piece covers."""

    def rule(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.encode()

    return rule


def _gpt2_alphabet() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves, the other bytes for the characters from U+0100 on, in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _gpt2_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
