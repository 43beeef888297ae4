"""The forms in which a request brings prompts."""

from typing import TYPE_CHECKING

from rapid_llm.errors import RequestError

if TYPE_CHECKING:
    from rapid_llm.engine.frontend import Prompt


def prompts_of(name: str, value: str | list[str | int | list[int]]) -> "list[Prompt]":
    """One prompt or several, by what the list holds; the request calls it ``name``.

    Raises: RequestError on a mixed list.
    """
    if isinstance(value, str):
        return [value]
    kinds = {type(part) for part in value}
    if kinds <= {int}:
        return [[part for part in value if isinstance(part, int)]]
    if len(kinds) > 1:
        wanted = "a string, a list of token ids, or a list of either"
        raise RequestError(f"{name} cannot be used", param=name, got="a mixed list", wanted=wanted, change="send one of those")
    return [part for part in value if not isinstance(part, int)]
