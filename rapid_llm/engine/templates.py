"""Chat templates: messages to the one text that the model was trained on. Jinja, in its sandbox, imported on first use.

The names a template may use are those that Hugging Face's chat templates rely on, with the same meaning.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from rapid_llm.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_SHOWN = 80


def render(
    messages: Sequence[Mapping[str, Any]],
    template: str | None,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt of a conversation.

    Args:
        messages: at least one {"role": str, "content": str}; further keys go to the template as they are, those that are null
            do not: templates ask whether a key is there.
        template: Jinja source, None when the model has none.
        bos_token, eos_token: texts that the template may write.
        add_generation_prompt: end with the opening of the assistant's turn.
        tools: functions that the model may call: {"type": "function", "function": {"name": str, ...}}, at least one.

    Raises:
        RequestError: no template, messages or tools of another form, tools for a template that does not know them, or a template
            that cannot be used on the messages.
    """
    check_messages(messages)
    check_tools(tools)
    if not template:
        change = "use generate, which continues a text as it stands, or another model"
        raise RequestError("the model has no chat template", wanted="a model made for chat", change=change)
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    given = {name: text for name, text in tokens.items() if text is not None}
    from jinja2 import TemplateError

    # A template is a program over what the user sent: it may fail in any way an expression can.
    expected = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)
    try:
        if tools is not None and "tools" not in _names_used(template):
            problem, wanted = "the model's chat template does not know tools", "a template that uses the name 'tools'"
            change = "leave the tools out, or use a model made for them"
            raise RequestError(problem, param="tools", got=f"{len(tools)} of them", wanted=wanted, change=change)
        return _compiled(template).render(
            messages=plain, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **given
        )
    except expected as error:
        problem = "the chat template cannot be used on these messages"
        change = "change the messages, or use another model"
        raise RequestError(problem, got=f"{type(error).__name__}: {error}", change=change) from error


def check_messages(messages: Any) -> None:
    """Raise RequestError unless ``messages`` is a non-empty list of {"role": str, "content": str}.

    ``content`` may be missing or null beside ``tool_calls``.
    """
    wanted = 'a list of {"role": ..., "content": ...}'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _refused("messages", messages, wanted)
    if not messages:
        raise RequestError("messages is empty", wanted=wanted, change="send at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _refused(f"messages[{place}]", message, '{"role": ..., "content": ...}')
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise _refused(f"messages[{place}]['role']", message.get("role"), "a string such as 'user'")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise _refused(f"messages[{place}]['content']", content, "a string")


def check_tools(tools: Any) -> None:
    """Raise RequestError unless ``tools`` is None or a non-empty list of {"type": "function", "function": {"name": str, ...}}."""
    wanted = 'a list of {"type": "function", "function": {"name": ..., ...}}'
    if tools is None:
        return
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise _refused("tools", tools, wanted)
    if not tools:
        change = "send at least one tool, or leave tools out"
        raise RequestError("tools is empty", param="tools", wanted=wanted, change=change)
    for place, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise _refused(f"tools[{place}]", tool, '{"type": "function", "function": ...}')
        if tool.get("type") != "function":
            raise _refused(f"tools[{place}]['type']", tool.get("type"), "'function'")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _refused(f"tools[{place}]['function']", function, '{"name": ..., ...}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _refused(f"tools[{place}]['function']['name']", function.get("name"), "a string")


def _refused(what: str, value: Any, wanted: str) -> RequestError:
    got = f"{type(value).__name__} {value!r}"[:_SHOWN]
    param = what.partition("[")[0]
    return RequestError(f"{what} cannot be used", param=param, got=got, wanted=wanted, change=f"correct {what}")


@lru_cache(maxsize=16)
def _compiled(template: str) -> "Template":
    """A template in the sandbox; a server has one or two."""
    return _sandbox().from_string(template)


@lru_cache(maxsize=16)
def _names_used(template: str) -> set[str]:
    """Names whose values the template takes from outside."""
    from jinja2 import meta

    return meta.find_undeclared_variables(_sandbox().parse(template))


@lru_cache(maxsize=1)
def _sandbox() -> "ImmutableSandboxedEnvironment":
    from jinja2 import ext, nodes, parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(ext.Extension):
        """{% generation %} ... {% endgeneration %} marks the assistant's words for training; here they are just text."""

        tags = {"generation"}  # noqa: RUF012 - the attribute that Jinja reads

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            # A scope of its own: what is set inside ends with the block.
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
