"""The formats that models write calls of tools in: how each is told from a chat template, parsed, and asked for as a grammar."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rapid_llm.entrypoints.tools import hermes, llama3, mistral
from rapid_llm.entrypoints.tools.events import Parser
from rapid_llm.errors import ConfigError

TOOL_FORMATS = ("hermes", "llama3", "mistral")
"""What the setting ``tool_format`` may name."""

Mark = Callable[[str], str]
"""The text of a marker to the Lark symbol for it: a special token where the model has one, else the text."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_BLANKS = {"x-guidance": {"whitespace_pattern": r"[ \n\t\r]{1,32}"}}


@dataclass(frozen=True)
class ToolFormat:
    """A format.

    Attributes:
        name: of TOOL_FORMATS.
        call: the text of a call with "%NAME" and "%ARGUMENTS" in their places.
        opens, between, closes: what stands before the first call, between two, and behind the last: each part is for Mark.
        before, after: what stands around each call.
    """

    name: str
    call: str
    opens: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def parser(self, names: frozenset[str]) -> Parser:
        """A parser of one answer; ``names`` are the tools that may be called."""
        if self.name == "llama3":
            return llama3.Llama3Parser(names)
        return hermes.HermesParser() if self.name == "hermes" else mistral.MistralParser()

    def lark(self, tools: Sequence[Mapping[str, Any]], mark: Mark, *, many: bool) -> str:
        """Rules named ``calls``, of one call of one of ``tools`` or, with ``many``, of one after another."""
        around = {part: _symbols(getattr(self, part), mark) for part in ("opens", "between", "closes", "before", "after")}
        bodies = [self._body(tool, mark) for tool in tools]
        names = " | ".join(f"call_{number}" for number in range(len(bodies)))
        more = f" ({around['between']} call)*" if many else ""
        return "\n".join(
            [
                f"calls: {around['opens']} call{more} {around['closes']}",
                f"call: {around['before']} ({names}) {around['after']}",
                *(f"call_{number}: {body}" for number, body in enumerate(bodies)),
            ]
        )

    def _body(self, tool: Mapping[str, Any], mark: Mark) -> str:
        function = tool["function"]
        schema = function.get("parameters") or _NO_PARAMETERS
        before, _, after = self.call.partition("%ARGUMENTS")
        name = function["name"] if self.call.startswith("%NAME") else json.dumps(function["name"], ensure_ascii=False)
        parts = [part for part in before.replace("%NAME", name).partition(mistral.ARGS) if part]
        arguments = f"%json {json.dumps(dict(schema) | _BLANKS)}"
        return " ".join([_symbols(parts, mark), arguments, _symbols((after,) if after else (), mark)])


HERMES = ToolFormat(
    name="hermes",
    call='{"name": %NAME, "arguments": %ARGUMENTS}',
    before=(hermes.OPEN, "\n"),
    between=("\n",),
    after=("\n", hermes.CLOSE),
)
LLAMA3 = ToolFormat(name="llama3", call='{"name": %NAME, "parameters": %ARGUMENTS}', between=("; ",))
MISTRAL_LIST = ToolFormat(
    name="mistral",
    call='{"name": %NAME, "arguments": %ARGUMENTS}',
    opens=(mistral.OPEN, "["),
    between=(", ",),
    closes=("]",),
)
MISTRAL_NAMED = ToolFormat(name="mistral", call=f"%NAME{mistral.ARGS}%ARGUMENTS", before=(mistral.OPEN,))


def tool_format(template: str | None, setting: str | None = None) -> ToolFormat | None:
    """The format of a model.

    Args:
        template: its chat template.
        setting: of TOOL_FORMATS; None looks for the format's marks in the template.

    Returns: None where the template shows no format that is parsed here.
    Raises: ConfigError on a setting that is no format.
    """
    text = template or ""
    is_named = mistral.ARGS in text
    if setting is not None:
        if setting not in TOOL_FORMATS:
            wanted, change = " | ".join(TOOL_FORMATS), "pass one of those"
            raise ConfigError("tool_format is not supported", got=repr(setting), wanted=wanted, change=change)
        return {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL_NAMED if is_named else MISTRAL_LIST}[setting]
    if mistral.OPEN in text:
        return MISTRAL_NAMED if is_named else MISTRAL_LIST
    if hermes.OPEN in text and "<function=" not in text:  # Qwen3-Coder writes XML between the same tags
        return HERMES
    if '"parameters": ' in text and (llama3.PYTHON_TAG in text or "ipython" in text):
        return LLAMA3
    return None


def _symbols(parts: Sequence[str], mark: Mark) -> str:
    return " ".join(mark(part) for part in parts)
