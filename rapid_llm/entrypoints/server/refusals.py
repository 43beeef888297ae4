"""Errors -> answers: the status, and a body in OpenAI's shape."""

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rapid_llm.entrypoints.protocol.errors import ErrorBody, ErrorDetail
from rapid_llm.errors import EngineDiedError, RapidError, RequestError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_RETRY_SECONDS = 1.0


class RefusalError(RapidError):
    """A request that is answered with another status than 400.

    Args:
        status: of HTTP.
        code: what kind of refusal it is, for programs.
        param: the field that is wrong, if one is.
        retry_after: seconds after which it may be served; None where the same request never is.
    """

    def __init__(
        self, status: int, problem: str, *, code: str, param: str = "", retry_after: float | None = None, **parts: str
    ) -> None:
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after
        super().__init__(problem, **parts)


def status_of(error: RapidError) -> int:
    """The status that tells of ``error``: 400 and its like where the sender can mend it."""
    if isinstance(error, RefusalError):
        return error.status
    if isinstance(error, RequestError):
        return 400
    return 503 if isinstance(error, EngineDiedError) else 500


def detail_of(error: RapidError) -> ErrorDetail:
    """What a client is told of ``error``. What a dying engine said stays in the server's log."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if isinstance(error, EngineDiedError):
        return ErrorDetail("the engine has ended; send the request again.", kind, code="engine_died")
    code = error.code if isinstance(error, RefusalError | RequestError) else "internal_error"
    param = error.param if isinstance(error, RefusalError | RequestError) else ""
    return ErrorDetail(str(error), kind, param or None, code)


def body_of(error: RapidError) -> bytes:
    """The JSON of an error, as an answer's body or a stream's event."""
    return _body(detail_of(error))


def refuse(error: RapidError) -> Response:
    """The answer that tells of ``error``."""
    headers = {}
    retry_after = error.retry_after if isinstance(error, RefusalError) else _RETRY_SECONDS if status_of(error) == 503 else None
    if retry_after is not None:
        headers["Retry-After"] = str(math.ceil(retry_after))
    return _answer(status_of(error), detail_of(error), headers)


async def on_rapid_error(_: Request, error: Exception) -> Response:
    """Starlette's handler of RapidErrors."""
    return refuse(error) if isinstance(error, RapidError) else await on_bug(_, error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of unknown paths and methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = "unknown path" if status == 404 else "method not allowed" if status == 405 else "the request cannot be served"
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    message = f"{words}: got {request.method} {request.url.path}; see /openapi.json."
    return _answer(status, ErrorDetail(message, "invalid_request_error", code=words.replace(" ", "_")), headers)


async def on_bug(_: Request, error: Exception) -> Response:
    """Starlette's handler of everything else, which it raises again, so that the log has the trace."""
    return _answer(500, ErrorDetail("the server has failed; its log says how.", "server_error", code="internal_error"), {})


def _answer(status: int, detail: ErrorDetail, headers: dict[str, str]) -> Response:
    return Response(_body(detail), status, headers, "application/json")


def _body(detail: ErrorDetail) -> bytes:
    return msgspec.json.encode(ErrorBody(detail))
