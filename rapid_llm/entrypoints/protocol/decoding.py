"""Bytes of a body -> a request; what is wrong with them is said as the package says it anywhere: what came, what was wanted."""

import re
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import msgspec

from rapid_llm.config import SamplingParams
from rapid_llm.entrypoints.protocol.fields import SAMPLING, DrawingFields, sampling_params
from rapid_llm.envs import nearest
from rapid_llm.errors import RequestError

_T = TypeVar("_T", bound=msgspec.Struct)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`(?: - at `\$\.?(?P<at>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*?)`(?: - at `\$\.?(?P<at>.*)`)?$", re.DOTALL)
_WRONG = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<at>.*)`)?$", re.DOTALL)


def decode(body: bytes, kind: type[_T]) -> _T:
    """The request that a body holds.

    Raises: RequestError on what is no JSON, and on fields that are unknown, missing or of the wrong type.
    """
    try:
        return cast("_T", _parse(body, kind))
    except msgspec.ValidationError as error:
        if issubclass(kind, DrawingFields):
            _check_sampling(_parse(body, Any))
        raise _refused(str(error), kind) from None


def _parse(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        wanted, change = "a JSON object", "send one in UTF-8"
        raise RequestError("the body is no JSON", code="invalid_json", got=str(error), wanted=wanted, change=change) from None


def _check_sampling(fields: Any) -> None:
    """Let SamplingParams say it where it is one of its values that is wrong."""
    if isinstance(fields, dict):
        biases = fields.get("logit_bias")
        if isinstance(biases, dict):
            fields["logit_bias"] = {int(key) if re.fullmatch(r"-?\d{1,18}", key) else key: bias for key, bias in biases.items()}
        for name in SAMPLING:  # one by one, so that what is out of range together does not hide what is wrong alone
            if fields.get(name) is not None and name not in ("logprobs_mode", "grammar"):
                sampling_params({name: fields[name]}, SamplingParams())


def _refused(message: str, kind: type[msgspec.Struct]) -> RequestError:
    if match := _UNKNOWN.match(message):
        field, at = match["field"], match["at"]
        wanted = nearest(field, kind.__struct_fields__) if not at else f"a field that {at} has"
        change = "correct its name or remove it"
        param = f"{at}.{field}" if at else field
        return RequestError("unknown field", param=param, code="unknown_parameter", got=repr(param), wanted=wanted, change=change)
    if match := _MISSING.match(message):
        name = ".".join(filter(None, (match["at"], match["field"])))
        return RequestError(f"{name} is missing", param=name, code="missing_required_parameter", change=f"send {name}")
    match = _WRONG.match(message)
    at, what = (match["at"] or "", match["what"]) if match else ("", message)
    wanted, _, got = what.removeprefix("Expected ").partition(", got ")
    if what.startswith("Invalid "):  # a value of the right type that is none of those that may be
        wanted, got = "one that is known", what.removeprefix("Invalid ").removeprefix("value ").removeprefix("enum value ")
    name = at or "the body"
    return RequestError(f"{name} cannot be used", param=at, code="invalid_type", got=got, wanted=wanted, change=f"correct {name}")


def schemas(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, Any]:
    """JSON schemas of types and of their parts, by name, as an OpenAPI page holds them."""
    _, components = msgspec.json.schema_components(list(kinds), ref_template="#/components/schemas/{name}")
    return components
