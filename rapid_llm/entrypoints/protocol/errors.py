"""Errors in the shape that OpenAI's clients read."""

import msgspec


class ErrorDetail(msgspec.Struct):
    """What is wrong, of which kind, with which field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is no success."""

    error: ErrorDetail
