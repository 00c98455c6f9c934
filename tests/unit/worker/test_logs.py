"""The lines of the worker's log."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from omlx_worker.logs import JsonFormatter, TextFormatter

HOSTILE = "j\x1b[2J\n12:00:00 I forged\x9b"


def record(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("test").makeRecord(
        "test", logging.WARNING, "file", 1, message, args, extra.pop("exc_info", None), extra=extra
    )


def raised(text: str) -> Any:
    try:
        raise ValueError(text)
    except ValueError:
        return sys.exc_info()


def test_a_name_from_redis_cannot_control_the_terminal_or_forge_a_line() -> None:
    text = TextFormatter().format(record("job %s is lost", HOSTILE))
    assert text.endswith(" W job j\\x1b[2J\\x0a12:00:00 I forged\\x9b is lost")


def test_a_traceback_keeps_its_lines_but_controls_nothing() -> None:
    text = TextFormatter().format(record("it failed", exc_info=raised("no \x1b[31m")))
    assert text.count("\n") > 2
    assert text.endswith("\nValueError: no \\x1b[31m")


def test_a_json_line_is_an_object_with_the_fields_of_the_record() -> None:
    line = JsonFormatter().format(record("job %s", HOSTILE, job=HOSTILE, tokens=3))
    assert "\n" not in line
    entry = json.loads(line)
    assert entry.pop("time").endswith("+00:00")
    assert entry == {"level": "warning", "message": f"job {HOSTILE}", "job": HOSTILE, "tokens": 3}


def test_a_json_line_holds_the_traceback() -> None:
    entry = json.loads(JsonFormatter().format(record("it failed", exc_info=raised("no"))))
    assert entry["traceback"].endswith("ValueError: no")
