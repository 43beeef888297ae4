"""What is asked: prompts of a length that no prefix cache has seen, or those of a file. The same for a seed."""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import msgspec

from rapid_llm.entrypoints.bench.settings import Load
from rapid_llm.errors import ConfigError

_COMMON = (
    "the of and to in is that it was for on are as with his they at be this have from or one had by but not what all were "
    "when your can said there use an each which she do how their if will up other about out many then them these so some "
    "her would make like him into time has look two more write go see number no way could people my than first water been "
    "call who oil its now find long down day did get come made may part over new sound take only little work know place "
    "year live me back give most very after thing our just name good sentence man think say great where help through much "
    "before line right too mean old any same tell boy follow came want show also around form three small set put end does"
)
_WORDS = _COMMON.split()
"""Common words of English: each is one token, with the space before it, to most tokenizers."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a file of prompts: one of ``prompt`` and ``messages``, and perhaps the length of its answer."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def bodies(load: Load, model: str, count: int, *, seed: int) -> list[dict[str, Any]]:
    """The bodies of so many requests.

    Args:
        load: which prompts.
        model: what they name.
        seed: of the random ones: another for those that are not counted.

    Raises: ConfigError when the file cannot be read, or holds what the endpoint does not take.
    """
    asks = islice(_asks(load, random.Random(seed)), count)
    given = {"model": model, "max_tokens": load.output_len}
    if load.temperature is not None:
        given["temperature"] = load.temperature
    if load.ignore_eos:
        given["ignore_eos"] = True
    return [{**given, **ask, **load.body} for ask in asks]


def _asks(load: Load, draw: random.Random) -> Iterator[dict[str, Any]]:
    if load.prompts not in ("words", "ids"):
        yield from cycle(_of_file(load))
    while True:
        if load.prompts == "ids":
            yield {"prompt": [draw.randrange(load.ids_below) for _ in range(load.input_len)]}
        else:
            yield _as_asked(load, " ".join(draw.choices(_WORDS, k=load.input_len)))


def _as_asked(load: Load, text: str) -> dict[str, Any]:
    return {"prompt": text} if load.endpoint == "completions" else {"messages": [{"role": "user", "content": text}]}


def _of_file(load: Load) -> Sequence[dict[str, Any]]:
    path, wanted = load.prompts, 'lines such as "a text" or {"prompt": "a text", "max_tokens": 20}'
    try:
        with open(path, encoding="utf-8") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        change = "give words, ids, or the path of a JSONL file"
        raise ConfigError(f"cannot read the prompts in {path}", got=str(error), wanted=wanted, change=change) from None
    if not lines:
        raise ConfigError(f"{path} holds no prompts", wanted=wanted, change="fill it")
    return [_of_line(load, line, f"{path}:{number}", wanted) for number, line in lines]


def _of_line(load: Load, text: str, where: str, wanted: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        line = _Line(prompt=value) if isinstance(value, str) else msgspec.convert(value, _Line)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where} is no prompt", got=str(error), wanted=wanted, change="correct it") from None
    ask: dict[str, Any] = {} if line.max_tokens is None else {"max_tokens": line.max_tokens}
    if (line.prompt is None) == (line.messages is None):
        raise ConfigError(f"{where} is no prompt", got="both or neither", wanted="prompt or messages", change="keep one")
    if isinstance(line.prompt, str):
        return {**_as_asked(load, line.prompt), **ask}
    name, endpoint = ("prompt", "completions") if line.messages is None else ("messages", "chat")
    if endpoint != load.endpoint:
        got, change = f"{name} for the endpoint {load.endpoint!r}", f"add --endpoint {endpoint}"
        raise ConfigError(f"{where} is not for this endpoint", got=got, wanted=f"{endpoint!r}", change=change)
    return {**ask, name: line.prompt if line.messages is None else line.messages}
