"""A config file in TOML: what EngineConfig names, and what a server takes in a table [server]. Torch-free."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from rapid_llm.config import refuse_unknown
from rapid_llm.errors import ConfigError

SERVER_TABLE = "server"
_FLAG, _DEFAULT, _SECRET = "flag", "default", "********"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Settled(Generic[_T]):
    """A config and where each of its values came from.

    Attributes:
        config: the config.
        sources: for each field "flag", the name of a file, or "default".
        secrets: fields whose values are never printed.
    """

    config: _T
    sources: Mapping[str, str]
    secrets: frozenset[str] = frozenset()

    def to_toml(self) -> str:
        """As lines of a config file, each with its source behind it; what is chosen at the start is commented out."""
        return "".join(f"{self._line(name):<44}  # {source}\n" for name, source in self.sources.items())

    def _line(self, name: str) -> str:
        value = getattr(self.config, name)
        if name in self.secrets and value:
            value = _SECRET
        # Strings and lists of them are written alike in JSON and TOML; a None has no form there.
        return f"# {name} is chosen at the start" if value is None else f"{name} = {json.dumps(value).replace('Infinity', 'inf')}"


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The values of a file; the server's table is a dict under SERVER_TABLE.

    Raises: ConfigError when it cannot be read or is no TOML.
    """
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        change = "correct the path or the file's permissions"
        raise ConfigError(f"cannot read {path}", got=error.strerror or str(error), wanted="a TOML file", change=change) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        wanted = "lines such as max_num_seqs = 16"
        raise ConfigError(f"{path} is no TOML", got=str(error), wanted=wanted, change="correct it") from None


def engine_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of the engine: all but the server's table, which other commands than ``serve`` leave aside."""
    return {name: value for name, value in values.items() if name != SERVER_TABLE}


def settle(kind: type[_T], in_file: Mapping[str, Any], given: Mapping[str, Any], path: str | None, what: str) -> Settled[_T]:
    """A config of ``kind``: flags that were given, then the file, then defaults.

    Args:
        kind: a dataclass that checks its values.
        in_file: what the file says of it.
        given: what flags say of it.
        path: the file's; None where there is none.
        what: what one of its fields is called in an error.

    Raises: ConfigError on a key that is none of its fields, with the nearest one.
    """
    names = [field.name for field in fields(cast("Any", kind))]
    refuse_unknown(in_file, names, f"{what} in {path}")
    known = {**in_file, **given}
    sources = {name: _FLAG if name in given else str(path) if name in in_file else _DEFAULT for name in names}
    return Settled(kind(**known), sources)
