"""Every environment variable of the package's own: its type, its default, one line on what it does.

A value that cannot be read and a ``RAPID_`` name that is not in the table raise, so that a typo never runs with a default.
"""

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rapid_llm.errors import ConfigError

PREFIX = "RAPID_"


def nearest(name: str, known: Iterable[str]) -> str:
    """What a message says was wanted in place of an unknown ``name``: the closest known one, or all of them."""
    candidates = {candidate.lower(): candidate for candidate in sorted(known)}
    close = difflib.get_close_matches(name.lower(), candidates, n=1, cutoff=0.5)
    return f"perhaps {candidates[close[0]]!r}" if close else f"one of {', '.join(candidates.values())}"


def _directory(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ValueError("a folder, this is a file")
    return path


def _directory_or_off(text: str) -> Path | Literal["off"]:
    return "off" if text == "off" else _directory(text)


def _kernel_choices(text: str) -> dict[str, str]:
    choices: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        op, equals, row = (piece.strip() for piece in part.partition("="))
        if not (op and equals and row):
            raise ValueError(f"'op=row' pairs with commas between, {part!r} is none")
        if op in choices:
            raise ValueError(f"one row an op, {op!r} stands twice")
        choices[op] = row
    return choices


@dataclass(frozen=True)
class Environment:
    """The table. A field ``data_dir`` is the variable ``RAPID_DATA_DIR``."""

    data_dir: Path | None = field(
        default=None,
        metadata={"parse": _directory, "summary": "folder of the user's evidence and tiles; default: the platform's data folder"},
    )
    kernels: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"parse": _kernel_choices, "summary": "rows to serve in place of the ranked ones: 'swiglu=torch.swiglu,op=row'"},
    )
    quantize_cache: Path | Literal["off"] | None = field(
        default=None,
        metadata={
            "parse": _directory_or_off,
            "summary": "folder where quantised weights are kept for the next start, or off; default: in the data folder",
        },
    )
    bytecode: Path | Literal["off"] | None = field(
        default=None,
        metadata={
            "parse": _directory_or_off,
            "summary": "folder for compiled Python of packages that have none beside them, or off; default: in the data folder",
        },
    )
    api_key: str = field(
        default="",
        metadata={"parse": str, "summary": "a key that each request to `rapid-llm serve` must bring, in place of --api-key"},
    )
    commit: str = field(
        default="",
        metadata={"parse": str, "summary": "commit that evidence and results are recorded for, where there is no git history"},
    )


def known_variables() -> dict[str, str]:
    """Every variable's name and what it does, in the order of the table."""
    return {PREFIX + entry.name.upper(): entry.metadata["summary"] for entry in fields(Environment)}


def environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the table from ``variables`` (default: this process's). An empty value counts as not set.

    Raises: ConfigError on a value that cannot be read and on a RAPID_ name that is not in the table.
    """
    variables = os.environ if variables is None else variables
    given = {name: value for name, value in variables.items() if name.startswith(PREFIX)}
    entries = {PREFIX + entry.name.upper(): entry for entry in fields(Environment)}
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in entries:
            wanted = nearest(name, entries)
            raise ConfigError("unknown environment variable", got=name, wanted=wanted, change="correct its name or unset it")
        if text.strip():
            values[entries[name].name] = _parse(name, text, entries[name].metadata["parse"])
    return Environment(**values)


def _parse(name: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text.strip())
    except ValueError as error:
        raise ConfigError(
            f"cannot read {name}", got=repr(text), wanted=str(error), change=f"set {name} to that or unset it"
        ) from None


def data_folder() -> Path:
    """Where the user's stores lie. The folder need not exist yet."""
    chosen = environment().data_dir
    if chosen is not None:
        return chosen
    import platformdirs

    return Path(platformdirs.user_data_dir("rapid_llm"))


def bytecode_folder() -> Path | None:
    """Where compiled Python of others' packages is kept; None keeps none."""
    chosen = environment().bytecode
    if chosen == "off":
        return None
    return chosen or data_folder() / "bytecode"
