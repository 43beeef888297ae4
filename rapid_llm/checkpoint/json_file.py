"""JSON objects from files that nobody vouches for: bounded, and every way to be broken is a CheckpointError."""

import json
from pathlib import Path
from typing import Any

from rapid_llm.errors import CheckpointError

MAX_JSON_BYTES = 100 << 20


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object that ``path`` holds.

    Raises:
        CheckpointError: the file cannot be read, is larger than ``max_bytes``, or holds no JSON object.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(
                f"{path} is too large", got=f"{size:,} bytes", wanted=f"at most {max_bytes:,}", change="check the file"
            )
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read", got=str(error.strerror), change="check the path and its rights"
        ) from error
    return parse_json_object(data, str(path))


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """The object that ``data`` encodes; ``what`` names it in the message. A key that stands twice in an object is refused."""
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"{what} is not valid JSON", got=reason, wanted="a JSON object", change="fetch the file again"
        ) from error
    if not isinstance(value, dict):
        got = type(value).__name__
        raise CheckpointError(f"{what} holds no JSON object", got=got, wanted="an object", change="fetch the file again")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} stands twice")
    return result
