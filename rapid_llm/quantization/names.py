"""Which layers a checkpoint's lists of names mean: whole names, parts of them, wildcards, regular expressions."""

import re
from collections.abc import Iterable
from fnmatch import translate

from rapid_llm.errors import CheckpointError

_STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""What writers who stack layers call the stack that a layer is part of."""


class NamePatterns:
    """A list of patterns.

    "re:..." is a regular expression that must match from the start; with ``*``, ``?`` or ``[`` a pattern is a wildcard, whose
    star spans dots, for a layer or for a module that it is in; anything else is one or more whole parts of the name:
    "lm_head", "mlp.down_proj", "model.layers.0", but never half of a part ("mlp.gate" is not "mlp.gate_proj"). A layer also goes
    by the name of the stack that it is part of ("self_attn.qkv_proj").

    Args:
        patterns: the list.
        where: names it in errors.

    Raises: CheckpointError on what is no text or no regular expression.
    """

    def __init__(self, patterns: Iterable[object], where: str) -> None:
        self._parts: list[str] = []
        self._starts: list[re.Pattern[str]] = []
        self._wildcards: list[re.Pattern[str]] = []
        for pattern in patterns:
            if not isinstance(pattern, str) or not pattern:
                raise CheckpointError(f"{where} is no list of names", got=repr(pattern), wanted="text", change="correct it")
            try:
                if pattern.startswith("re:"):
                    self._starts.append(re.compile(pattern.removeprefix("re:")))
                elif any(letter in pattern for letter in "*?["):
                    self._wildcards.append(re.compile(translate(pattern)))
                else:
                    self._parts.append(f".{pattern}.")
            except re.error as error:
                wanted = "a regular expression"
                raise CheckpointError(f"{where} cannot be used", got=pattern, wanted=wanted, change="correct it") from error

    def match(self, name: str) -> bool:
        """Whether a pattern means the layer ``name``."""
        return any(self._match(spelling) for spelling in _spellings(name))

    def _match(self, name: str) -> bool:
        dotted = f".{name}."
        return (
            any(part in dotted for part in self._parts)
            or any(pattern.match(name) for pattern in self._starts)
            or any(pattern.match(module) for pattern in self._wildcards for module in _modules(name))
        )


def _spellings(name: str) -> tuple[str, ...]:
    module, _, last = name.rpartition(".")
    return (name, f"{module}.{_STACKED[last]}") if last in _STACKED else (name,)


def _modules(name: str) -> list[str]:
    """The layer and every module that it is in."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
