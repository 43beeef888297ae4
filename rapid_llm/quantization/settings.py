"""Typed look-ups in a checkpoint's quantisation config; every refusal names file and key."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rapid_llm.errors import CheckpointError

logger = logging.getLogger(__name__)


class Settings:
    """Part of a quantisation config.

    Args:
        raw: keys and values.
        file: names the checkpoint in errors.
        below: name of the part, before its keys: "config_groups.group_0.weights.".

    Raises: CheckpointError when ``raw`` is no mapping.
    """

    def __init__(self, raw: Any, file: Path, below: str = "") -> None:
        self.file, self.below = file, below
        if not isinstance(raw, Mapping):
            name = below.rstrip(".") or "quantization_config"
            raise CheckpointError(f"{file}: {name!r} cannot be used", got=repr(raw), wanted="an object", change="correct it")
        self.raw: Mapping[str, Any] = raw
        self._asked: set[str] = set()

    def get(self, key: str) -> Any:
        """The value; None where there is none."""
        self._asked.add(key)
        return self.raw.get(key)

    def refused(self, key: str, wanted: str, change: str = "use a checkpoint of a format that is served") -> CheckpointError:
        """The error for a value that is not served."""
        got = repr(self.raw[key]) if key in self.raw else "no such key"
        problem = f"{self.file}: quantisation key {self.below + key!r} is not served"
        return CheckpointError(problem, got=got, wanted=wanted, change=change)

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """A value of ``allowed``, with its type; null and absent are ``default``, which is refused unless it is allowed too."""
        value = self.get(key)
        value = default if value is None else value
        for each in allowed:
            if type(each) is type(value) and each == value:
                return each
        raise self.refused(key, " | ".join("no such key" if each is None else repr(each) for each in allowed))

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false."""
        return bool(self.one_of(key, (True, False), default))

    def part(self, key: str) -> "Settings | None":
        """The object under ``key``; None where there is none."""
        value = self.get(key)
        return None if value is None else Settings(value, self.file, f"{self.below}{key}.")

    def names(self, *keys: str) -> list[Any]:
        """The list under the first of ``keys`` that is there; empty where none is."""
        for key in keys:
            value = self.get(key)
            if value is not None:
                if not isinstance(value, list):
                    raise self.refused(key, "a list of names")
                return value
        return []

    def group(self, key: str, served: tuple[int, ...]) -> int:
        """A group size, 0 for whole rows, which files write as -1; null and absent are 0 too."""
        value = self.get(key)
        if value in (None, -1) and not isinstance(value, bool):
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or value not in served:
            raise self.refused(key, f"{', '.join(map(str, served))} or -1 for whole rows")
        return value

    def log_unknown(self, harmless: Iterable[str]) -> None:
        """Log in one line the keys that were not asked for and are not known to be harmless."""
        unknown = sorted(set(self.raw) - self._asked - set(harmless))
        if unknown:
            below = f" of {self.below.rstrip('.')}" if self.below else ""
            keys = ", ".join(unknown)
            logger.warning(
                "%s: quantisation keys%s that this version does not know and does not follow: %s", self.file, below, keys
            )
