"""The log of the worker on stderr: lines of text, or JSON objects."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from omlx_producer.terminal import one_cell

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

_STANDARD = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime"}


def start_logging(level: LogLevel, form: LogFormat = "text") -> None:
    """Log to stderr from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler])
    logging.getLogger().setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """A line for each record, and its traceback. Names from Redis cannot control the terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_cell(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(one_cell, super().formatException(ei).split("\n")))


class JsonFormatter(logging.Formatter):
    """An object for each record: time, level, message, and what the caller gave as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        entry |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
