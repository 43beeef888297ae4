"""What surrounds every request: its id, its key, its line in the log."""

import hmac
import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rapid_llm.entrypoints.server.page import is_page
from rapid_llm.entrypoints.server.refusals import RefusalError, refuse

if TYPE_CHECKING:
    from rapid_llm.entrypoints.server.tracing import Tracing

logger = logging.getLogger("rapid_llm.requests")
_PROBES = frozenset({"/health", "/ready", "/metrics", "/engine"})
"""Asked every few seconds: a line for each would bury the others."""
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Served without a key, which probes do not have."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Edge:
    """An ASGI app around another.

    Args:
        app: the app that answers.
        note: called with the status of each answer; 0 where its client left before there was one.
        api_keys: one of which a request must bring; empty asks for none.
        log_requests: write a line for each.
        tracing: follows each, but for probes; None follows none.
    """

    def __init__(
        self,
        app: ASGIApp,
        note: Callable[[int], None],
        api_keys: tuple[str, ...],
        *,
        log_requests: bool,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._app, self._note, self._log_requests, self._tracing = app, note, log_requests, tracing
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifespan, which passes through."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        log = scope["log"] = {"request_id": request_id}
        begun, status = time.monotonic(), 0
        is_probe = scope["path"] in _PROBES
        trace = None if self._tracing is None or is_probe else self._tracing.begin(scope, headers)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            app = self._app if self._may_pass(scope, headers) else refuse(_unknown_key(headers))
            await app(scope, receive, send_with_id)
        finally:
            self._note(status)
            if trace is not None:
                trace.end(status)
            if self._log_requests and not is_probe:
                self._log(scope, status, time.monotonic() - begun, log)

    def _may_pass(self, scope: Scope, headers: Headers) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS or is_page(scope["path"]) or scope["method"] == "OPTIONS":
            return True
        kind, _, key = headers.get("authorization", "").partition(" ")
        # All of them are compared, each in the same time whatever is equal.
        matches = [hmac.compare_digest(key.strip().encode(), its) for its in self._keys]
        return kind.lower() == "bearer" and any(matches)

    def _log(self, scope: Scope, status: int, seconds: float, log: dict[str, Any]) -> None:
        fields = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": round(seconds, 4), **log}
        logger.info("request", extra={"fields": fields})


def _unknown_key(headers: Headers) -> RefusalError:
    got = "no key" if "authorization" not in headers else "another key"
    change = 'send the header "Authorization: Bearer KEY"'
    return RefusalError(401, "the API key is not known", code="invalid_api_key", got=got, change=change)
