"""What the text of an answer may be: OpenAI's formats."""

from typing import Any

import msgspec

from rapid_llm.config import Grammar
from rapid_llm.entrypoints.protocol.fields import GrammarField, Strict
from rapid_llm.errors import RequestError


class TextFormat(Strict, kw_only=True, tag_field="type", tag="text"):
    """Any text."""

    def grammar(self) -> None:
        """Nothing is forbidden."""
        return

    def for_chat(self) -> "TextFormat":
        """As chat writes it."""
        return self


class JsonObjectFormat(Strict, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object."""

    def grammar(self) -> Grammar:
        """As SamplingParams takes it."""
        return Grammar("json_object")

    def for_chat(self) -> "JsonObjectFormat":
        """As chat writes it."""
        return self


class JsonSchema(Strict, kw_only=True):
    """A schema. The answer keeps to it whatever ``strict`` says; ``name`` and ``description`` are for those who read requests."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def grammar(self) -> Grammar:
        """As SamplingParams takes it."""
        return Grammar("json_schema", msgspec.json.encode(self.schema).decode())


class JsonSchemaFormat(Strict, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON by a schema."""

    json_schema: JsonSchema

    def grammar(self) -> Grammar:
        """As SamplingParams takes it."""
        return self.json_schema.grammar()


class FlatSchemaFormat(JsonSchema, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON by a schema, as /v1/responses writes it."""

    def for_chat(self) -> JsonSchemaFormat:
        """As chat writes it."""
        return JsonSchemaFormat(json_schema=JsonSchema(schema=self.schema, name=self.name))


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
"""Of chat completions."""
ResponseTextFormat = TextFormat | JsonObjectFormat | FlatSchemaFormat
"""Of /v1/responses."""


def format_grammar(format: ResponseFormat | None, grammar: GrammarField | None, name: str) -> dict[str, Grammar]:
    """The value of SamplingParams that a format stands for, if it stands for one; the request calls it ``name``.

    Raises: RequestError when it cannot be used, or ``grammar`` says something as well.
    """
    try:
        value = None if format is None else format.grammar()
    except RequestError as error:
        error.param = name
        raise
    if value is not None and grammar is not None:
        got, change = f"{value.kind} and {grammar.kind}", "send one of them"
        raise RequestError(f"{name} and grammar contradict each other", param=name, got=got, change=change)
    return {} if value is None else {"grammar": value}
