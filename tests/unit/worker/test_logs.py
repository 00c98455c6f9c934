"""The lines of the worker's log."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omlx_worker.logs import JsonFormatter, TextFormatter, log_again

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


def test_what_a_child_logs_as_json_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    raising = record("it %s", HOSTILE, job="j1", exc_info=raised("no \x1b[31m"))
    assert log_again(JsonFormatter().format(raising))
    [again] = caplog.records
    assert (again.levelno, again.getMessage()) == (logging.WARNING, f"it {HOSTILE}")
    text, line = TextFormatter().format(again), json.loads(JsonFormatter().format(again))
    assert text.partition(" ")[2] == TextFormatter().format(raising).partition(" ")[2]
    assert line["job"] == "j1"
    assert line["traceback"].endswith("no \x1b[31m")
    for other in ("a warning of a library", "[1]", '{"level": "warning"}', '{"time": 1}'):
        assert not log_again(other)


def test_a_file_gets_all_of_stderr_and_has_three_older_ones_beside_it(tmp_path: Path) -> None:
    """Also what another process writes, and the traceback of the end."""
    code = (
        "import logging, os, sys; from pathlib import Path; from omlx_worker import logs; "
        "logs.LARGEST_FILE = 2000; "
        "logs.start_logging('info', file=Path(sys.argv[1], 'new', 'worker.log')); "
        "[logging.info('line %d', n) for n in range(1000)]; "
        "os.system('echo from a child >&2'); "
        "raise ValueError('the end')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    assert ended.stderr == ""
    files = sorted((tmp_path / "new").iterdir())
    assert [path.name for path in files] == ["worker.log", *(f"worker.log.{n}" for n in (1, 2, 3))]
    assert all(path.stat().st_size < 3000 for path in files)
    last = files[0].read_text()
    assert "I line 999\n" in last
    assert last.startswith("20"), "a file of many days says the date"
    assert "\nfrom a child\n" in last
    assert last.endswith("ValueError: the end\n")
