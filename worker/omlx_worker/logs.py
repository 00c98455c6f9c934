"""The log of the worker on stderr or in a file: lines of text, or JSON objects."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from omlx_producer.terminal import one_cell

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

LARGEST_FILE, OLDER_FILES = 10_000_000, 3

_STANDARD = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime"}


def start_logging(level: LogLevel, form: LogFormat = "text", file: Path | None = None) -> None:
    """Log to stderr from now on.

    Args:
        file: takes the place of stderr.

    Raises:
        OSError: if that file cannot be written.
    """
    handler = StderrFile(file) if file else logging.StreamHandler(sys.stderr)
    text = TextFormatter("%Y-%m-%d %H:%M:%S") if file else TextFormatter()
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(handlers=[handler])
    logging.getLogger().setLevel(level.upper())


def log_again(line: str) -> bool:
    """Log what a child has logged as JSON; returns whether a line is that."""
    try:
        entry = json.loads(line)
        _, name, message = (entry.pop(each) for each in ("time", "level", "message"))
        level = logging.getLevelNamesMapping()[name.upper()]
    except (ValueError, TypeError, LookupError, AttributeError):
        return False
    known = {"msg": message, "levelno": level, "levelname": name.upper()}
    if "traceback" in entry:
        known["exc_text"] = _one_cells(str(entry["traceback"]))
    record = logging.makeLogRecord({**entry, **known})
    logging.getLogger().handle(record)
    return True


class StderrFile(RotatingFileHandler):
    """Logs to a file, which also gets all else of stderr. Keeps three older files of 10 MB."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=LARGEST_FILE, backupCount=OLDER_FILES, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        os.dup2(stream.fileno(), 2)
        return stream


class TextFormatter(logging.Formatter):
    """A line for each record, and its traceback. Names from Redis cannot control the terminal."""

    def __init__(self, time: str = "%H:%M:%S") -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", time)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_cell(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _one_cells(super().formatException(ei))


def _one_cells(text: str) -> str:
    return "\n".join(map(one_cell, text.split("\n")))


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
