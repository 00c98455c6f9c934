"""omlx-submit run as a person sees it, on terminals of several widths."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.helpers.bulk_runs import CODE, batch_line, count_lines, wait_for_model, write_jsonl
from tests.helpers.screens import Session
from tests.helpers.workers import wait_for, worker_process

ROWS = 3000


def start(url: str, folder: Path, columns: int, output: str) -> Session:
    command = [sys.executable, "-c", CODE, "run", "rows.jsonl", "-o", output, "--window", "50"]
    env = {"PYTHONPATH": ":".join(path for path in sys.path if path), "OMLX_QUEUE_REDIS_URL": url}
    return Session(command, columns, env=env, cwd=folder)


RUNNING = r" (\d+) running"


def shown(session: Session, figure: str = RUNNING) -> Any:
    """Rows done, all rows and a figure of the bar's line; None without such a bar."""
    for line in session.screen.lines:
        if found := re.match(rf"([\d,]+)/([\d,]+) .*{figure}", line):
            return [int(group.replace(",", "")) for group in found.groups()]
    return None


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_an_interrupt_leaves_the_total_and_a_clean_screen(
    redis_url: str, connection: redis.Redis, tmp_path: Path, columns: int
) -> None:
    bad = {"custom_id": "bad", "body": {}}
    rows = [bad, *(batch_line(f"r{n}", max_tokens=20) for n in range(ROWS - 1))]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    # Beside a long time left there is no room for more.
    figure = " left" if columns == 60 else RUNNING
    with worker_process(redis_url, max_rows=8, step_seconds=0.01):
        wait_for_model(connection)
        with start(redis_url, tmp_path, columns, "out.jsonl") as session:
            wait_for(
                lambda: count_lines(tmp_path / "out.jsonl") > 20 and shown(session, figure),
                what=f"the bar on {session.screen}",
            )
            done, total, *running = shown(session, figure)
            assert 0 < done < total == ROWS
            assert all(rows <= 8 for rows in running)
            session.type(b"\x03")
            assert session.wait() == 130
            lines = session.screen.lines
    assert lines[0].startswith("line 1, id 'bad': ")
    (bar,) = (line for line in lines if "\u2501" in line)
    assert re.match(rf"[\d,]+/{ROWS:,} ", bar), lines
    assert not any("^C" in line for line in lines)
    after = lines[lines.index(bar) + 1]
    assert re.match(r"\d+ rows in ", after), lines


def test_two_runs_share_the_rows_and_tokens_that_they_show(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [batch_line(f"r{n}", max_tokens=2000) for n in range(100)])
    with worker_process(redis_url, max_rows=8, step_seconds=0.01):
        wait_for_model(connection)
        with (
            start(redis_url, tmp_path, 120, "one.jsonl") as one,
            start(redis_url, tmp_path, 120, "two.jsonl") as two,
        ):
            wait_for(lambda: all(map(shown, (one, two))))

            def running() -> list[int]:
                return [shown(session)[2] for session in (one, two)]

            wait_for(lambda: sum(running()) == 8, what="eight rows in all")
