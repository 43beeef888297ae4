"""What a request says of tools, made into what its parts need: tools for the template, a grammar, and a parser of the answer."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapid_llm.config import Grammar
from rapid_llm.engine.templates import check_tools
from rapid_llm.entrypoints.tools import reasoning
from rapid_llm.entrypoints.tools.events import Parser
from rapid_llm.entrypoints.tools.formats import TOOL_FORMATS, ToolFormat
from rapid_llm.errors import RequestError

if TYPE_CHECKING:
    from rapid_llm.engine.tokenizer import Tokenizer

Tool = Mapping[str, Any]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICE = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True)
class ToolPlan:
    """How a request's tools are served.

    Attributes:
        shown: tools that the chat template writes; None shows none.
        callable: of them, those that may be called.
        format: None where nothing is called.
        must_call: whether the answer is calls and nothing else.
        many: whether there may be several calls, by ``parallel_tool_calls``; only where a call is a must, since nobody can say
            what a model chooses to do.
    """

    shown: tuple[Tool, ...] | None = None
    callable: tuple[Tool, ...] = ()
    format: ToolFormat | None = None
    must_call: bool = False
    many: bool = True

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether ``skip_special_tokens`` must be off for the parser to see the format's marks."""
        return self.format is not None

    def parser(self, *, reasons: bool = False, inside: bool = False) -> Parser | None:
        """A parser of one answer; None where all of it is content.

        Args:
            reasons: whether the model marks its reasoning.
            inside: whether the prompt leaves it inside.
        """
        names = frozenset(tool["function"]["name"] for tool in self.callable)
        calls = None if self.format is None else self.format.parser(names)
        return reasoning.ReasoningParser(calls, inside=inside) if reasons else calls

    def grammar(self, tokenizer: "Tokenizer", *, inside: bool = False) -> Grammar | None:
        """What the answer may be; None where that is anything. ``inside``: it begins with the end of a reasoning."""
        if self.format is None or not self.must_call:
            return None
        rules = self.format.lark(self.callable, lambda text: _symbol(text, tokenizer), many=self.many)
        return Grammar("lark", _start("calls", tokenizer, inside=inside) + rules)


def plan_tools(tools: Sequence[Tool] | None, choice: Any, format: ToolFormat | None, *, parallel: bool = True) -> ToolPlan:
    """Read a request's ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Args:
        tools: as OpenAI's clients send them.
        choice: None is "auto" with tools and "none" without.
        format: the model's, of ``tool_format``.
        parallel: whether several calls may come.

    Raises: RequestError when they are of another form, name a tool that is not there, or the model's format is not known.
    """
    check_tools(tools)
    if tools is None:
        if choice not in (None, "none"):
            raise _refused("tool_choice needs tools", choice, "tools with it", "send tools, or leave tool_choice out")
        return ToolPlan()
    names = [tool["function"]["name"] for tool in tools]
    for place, name in enumerate(names):
        what = f"tools[{place}]['function']['name']"
        if not _NAME.fullmatch(name):
            raise _refused(f"{what} cannot be used", name, "1 to 64 of A-Z a-z 0-9 _ . -", "rename the tool")
        if name in names[:place]:
            raise _refused(f"{what} is there twice", name, "each name once", "rename the tool")
    for place, tool in enumerate(tools):
        parameters = tool["function"].get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            what = f"tools[{place}]['function']['parameters'] cannot be used"
            raise _refused(what, parameters, "a JSON schema", "send an object, or leave it out")
    if choice == "none":
        return ToolPlan()
    if format is None:
        wanted = f"one of {', '.join(TOOL_FORMATS)}"
        change = "set tool_format if it writes one of them, or leave the tools out"
        problem = "the format in which this model calls tools is not known"
        raise RequestError(problem, param="tools", wanted=wanted, change=change)
    if choice is None or choice == "auto":
        return ToolPlan(tuple(tools), tuple(tools), format)
    if choice == "required":
        return ToolPlan(tuple(tools), tuple(tools), format, must_call=True, many=parallel)
    name = _named(choice)
    if name not in names:
        raise _refused("tool_choice names a tool that is not there", name, " | ".join(names), "name one of the tools")
    return ToolPlan(tuple(tools), (tools[names.index(name)],), format, must_call=True, many=False)


def json_behind_reasoning(schema: str, tokenizer: "Tokenizer") -> Grammar:
    """JSON by ``schema`` (JSON text) of an answer whose prompt leaves the model inside its reasoning."""
    return Grammar("lark", _start("body", tokenizer, inside=True) + f"body: %json {schema}")


def behind_reasoning(grammar: Grammar, tokenizer: "Tokenizer") -> Grammar:
    """``grammar`` for an answer whose prompt leaves the model inside its reasoning; Lark says itself where that ends."""
    match grammar.kind:
        case "json_object":
            return json_behind_reasoning('{"type": "object"}', tokenizer)
        case "json_schema":
            return json_behind_reasoning(grammar.source, tokenizer)
        case "regex":
            source = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], grammar.source, flags=re.DOTALL)
            return Grammar("lark", _start("body", tokenizer, inside=True) + f"body: /{source}/")
        case _:
            return grammar


def _named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _refused("tool_choice cannot be used", choice, _CHOICE, "pass one of those")
    return name


def _start(rule: str, tokenizer: "Tokenizer", *, inside: bool) -> str:
    if not inside:
        return f"start: {rule}\n"
    if tokenizer.special_id(reasoning.CLOSE) is None:
        end = f"think[suffix={json.dumps(reasoning.CLOSE)}]: /(.|\\n)*/\n"
    else:
        end = f"think: /(.|\\n)*/ {_symbol(reasoning.CLOSE, tokenizer)}\n"
    return f"start: think /\\n{{0,2}}/ {rule}\n{end}"


def _symbol(text: str, tokenizer: "Tokenizer") -> str:
    """A special token by its id, any other text as it is."""
    special = tokenizer.special_id(text)
    return json.dumps(text, ensure_ascii=False) if special is None else f"<[{special}]>"


def _refused(problem: str, got: Any, wanted: str, change: str) -> RequestError:
    param = re.split(r"\W", problem)[0]  # each problem begins with its field
    return RequestError(problem, param=param, got=f"{got!r:.80}", wanted=wanted, change=change)
