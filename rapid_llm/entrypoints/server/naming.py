"""What an answer is called."""

import time
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from rapid_llm.entrypoints.server.serving import Serving


class Naming:
    """The fields that each part of one answer repeats.

    Attributes:
        fields: id, created (Unix time in seconds) and model.
    """

    def __init__(self, prefix: str, model: str) -> None:
        self.fields: dict[str, Any] = {"id": f"{prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}

    @classmethod
    def of(cls, request: Request, serving: Serving, prefix: str, ignored: list[str]) -> "Naming":
        """Names for the answer to ``request``; the log says them too, and the fields that were ignored."""
        naming = cls(prefix, serving.model)
        log = request.scope.setdefault("log", {})
        log["id"] = naming.fields["id"]
        if ignored:
            log["ignored"] = ignored
        return naming
