"""Log lines as JSON objects, one a line, on standard error."""

import json
import logging
import sys
from datetime import UTC, datetime

from rapid_llm.entrypoints.start_progress import CLEAR_LINE


class JsonLines(logging.Formatter):
    """Time, level, logger, event, and the fields that came with it.

    Args:
        before: what each line begins with.
    """

    def __init__(self, before: str = "") -> None:
        super().__init__()
        self._before = before

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return self._before + json.dumps(line, ensure_ascii=False, default=str)


def log_as_json() -> None:
    """Write the log of this process so."""
    handler = logging.StreamHandler(sys.stderr)
    # On a terminal a line takes the place of a progress bar, which is drawn again below it.
    handler.setFormatter(JsonLines(CLEAR_LINE if sys.stderr.isatty() else ""))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # of starting and ending this package says more
