"""What a tokenizer is made of, whatever it is read from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from rapid_llm.errors import CheckpointError


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer taken apart.

    Attributes:
        backend: the library's tokenizer.
        where: the file or folder it came from, for errors.
        bos_id, eos_ids: begin-of-text and end-of-text ids that the tokenizer itself names.
        adds_bos, adds_eos: whether they go around a plain prompt; None leaves it to the backend's post-processor.
        chat_template: Jinja source.
    """

    backend: Backend
    where: Path
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool | None
    adds_eos: bool | None
    chat_template: str | None


def read_flag(raw: Mapping[str, Any], key: str, file: Path) -> bool | None:
    """The true or false under ``key``; None where it is null or absent.

    Raises:
        CheckpointError: anything else.
    """
    value = raw.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise CheckpointError(f"{file}: key {key!r} cannot be used", got=repr(value), wanted="true or false", change="correct it")
