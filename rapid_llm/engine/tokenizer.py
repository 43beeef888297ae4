"""Text to token ids and back, with begin-of-text exactly once."""

from collections.abc import Iterable

from rapid_llm.checkpoint.source import CheckpointSource, TokenizerFolder, TokenizerSource
from rapid_llm.engine.folder_tokenizer import folder_parts
from rapid_llm.engine.gguf_tokenizer import gguf_parts
from rapid_llm.engine.token_bytes import TokenBytes
from rapid_llm.engine.tokenizer_parts import TokenizerParts
from rapid_llm.errors import CheckpointError, RequestError

_PROBE = "a"  # any text: shows what the post-processor puts around one


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    Attributes:
        bos_id: begin-of-text id, if the model has one.
        eos_ids: end-of-text ids that the tokenizer names; ``end_ids`` joins them with those of the other files.
        bos_token, eos_token: their texts, for templates.
        chat_template: Jinja source, if the checkpoint has one.
        vocab_size: tokens it knows; the model's own vocabulary may be padded beyond.
        leading_spaces: spaces its decoder drops at the very beginning of a text.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._bytes = TokenBytes(parts.backend, parts.where)
        self.leading_spaces = self._bytes.leading_spaces
        self.vocab_size = parts.backend.get_vocab_size(with_added_tokens=True)
        self.bos_id, self.eos_ids, self.chat_template = parts.bos_id, parts.eos_ids, parts.chat_template
        self.bos_token = None if parts.bos_id is None else self._known_token(parts.bos_id, parts)
        self.eos_token = self._known_token(parts.eos_ids[0], parts) if parts.eos_ids else None
        self._prefix, self._suffix = self._around(parts)

    @classmethod
    def from_source(cls, source: TokenizerSource) -> "Tokenizer":
        """Build the tokenizer of a checkpoint.

        Raises:
            CheckpointError: parts that are missing, broken, or of a kind that is not supported.
        """
        return cls(folder_parts(source) if isinstance(source, TokenizerFolder) else gguf_parts(source))

    @classmethod
    def from_checkpoint(cls, source: CheckpointSource) -> "Tokenizer":
        """``from_source`` of an open checkpoint."""
        return cls.from_source(source.tokenizer_source)

    @property
    def adds_bos(self) -> bool:
        """Whether a plain prompt gets a begin-of-text token, so that even an empty one is a prompt."""
        return self.bos_id is not None and self.bos_id in self._prefix

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens in the text become their ids.

        Args:
            text: any Unicode text.
            add_special_tokens: put begin-of-text before it where the model wants that, unless the text itself begins with
                it. False for rendered chat templates, which hold it already.

        Raises:
            RequestError: not a string, or a string with lone surrogates.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            got = "lone surrogates" if isinstance(text, str) else type(text).__name__
            raise RequestError(
                "the text cannot be encoded", got=got, wanted="a Unicode string", change="send valid text"
            ) from error
        if not add_special_tokens:
            return ids
        has_prefix = ids[: len(self._prefix)] == self._prefix
        return (ids if has_prefix else self._prefix + ids) + self._suffix

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Unknown ids give no text; bytes that are not UTF-8 give U+FFFD."""
        text = self.bytes_of(ids, skip_special_tokens=skip_special_tokens).decode("utf-8", "replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self.leading_spaces) :]

    def bytes_of(self, ids: Iterable[int], *, skip_special_tokens: bool) -> bytes:
        """UTF-8 bytes of ``ids``, which may begin or end inside a character; no leading space is dropped."""
        return self._bytes.join(ids, skip_special_tokens=skip_special_tokens)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that ``skip_special_tokens`` leaves out."""
        return self._bytes.special_ids

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text, if there is one."""
        ids = self.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and ids[0] in self.special_ids else None

    def token_text(self, token_id: int) -> str:
        """Text of one token as it stands inside a text; empty for an unknown id."""
        return self.bytes_of([token_id], skip_special_tokens=False).decode("utf-8", "replace")

    def _known_token(self, token_id: int, parts: TokenizerParts) -> str:
        token = self._backend.id_to_token(token_id) if token_id < 2**32 else None
        if token is None:
            wanted = f"one of its {self.vocab_size:,} tokens"
            raise CheckpointError(
                f"{parts.where}: a special token is unknown", got=f"id {token_id}", wanted=wanted, change="correct it"
            )
        return token

    def _around(self, parts: TokenizerParts) -> tuple[list[int], list[int]]:
        """Ids before and after a plain prompt: by the post-processor, then by the flags, which win."""
        plain = self._backend.encode(_PROBE, add_special_tokens=False).ids
        whole = self._backend.encode(_PROBE, add_special_tokens=True).ids
        places = [place for place in range(len(whole)) if whole[place : place + len(plain)] == plain] if plain else [len(whole)]
        if not places:
            problem, wanted = f"{parts.where}: the post-processor rewrites the text", "one that puts tokens around it"
            raise CheckpointError(problem, got=f"{plain} becomes {whole}", wanted=wanted, change="use another model")
        prefix, suffix = whole[: places[0]], whole[places[0] + len(plain) :]
        if parts.adds_bos is not None:
            prefix = [token for token in prefix if token != parts.bos_id]
            prefix = [self._flagged(parts.bos_id, "add_bos_token", parts), *prefix] if parts.adds_bos else prefix
        if parts.adds_eos is not None:
            suffix = [token for token in suffix if token not in parts.eos_ids]
            eos_id = parts.eos_ids[0] if parts.eos_ids else None
            suffix = [*suffix, self._flagged(eos_id, "add_eos_token", parts)] if parts.adds_eos else suffix
        return prefix, suffix

    @staticmethod
    def _flagged(token_id: int | None, flag: str, parts: TokenizerParts) -> int:
        if token_id is None:
            problem = f"{parts.where}: {flag} is set"
            raise CheckpointError(problem, got="no such token", wanted="the token's name or id", change=f"add it or unset {flag}")
        return token_id


def end_ids(source: CheckpointSource, tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends an answer: those of the model config, the generation config and the tokenizer together."""
    return frozenset((*source.config.eos_token_ids, *source.generation.eos_token_ids, *tokenizer.eos_ids))
