"""`omlx-submit run --dry-run N`: a few rows tried, and an estimate for all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from omlx_producer import Producer
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.trial import try_rows
from omlx_producer.client.workers import read_workers
from tests.helpers.bulk_runs import batch_line, jobs_in_redis, write_jsonl, write_rows
from tests.helpers.fake_worker import announce
from tests.helpers.workers import ALIAS, running_worker, wait_for
from tests.integration.producer.bulk.conftest import Run


@pytest.fixture
def trial(
    run: Run, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """The command in a folder, with a worker."""
    monkeypatch.chdir(tmp_path)
    with running_worker(redis_url), redis.Redis.from_url(redis_url) as connection:
        wait_for(lambda: read_workers(connection, ALIAS))
        yield run


def test_some_rows_run_and_all_are_estimated(
    trial: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    done = trial("run", "rows.jsonl", "--dry-run", "6", "--progress", "none")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["rows"] == 60
    tried = found["trial"]
    assert (tried["rows"], tried["failed"]) == (6, 0)
    assert tried["estimated_seconds"] == pytest.approx(10 * tried["seconds"], abs=0.6)
    *answers, estimate = done.stderr.splitlines()
    assert [answer.partition(": ")[0] for answer in answers] == ["r0", "r1"]
    assert re.fullmatch(r"all 60 rows: about [\d.]+ s at \d+ tokens/s", estimate)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert not connection.keys("omlx:batch:*:results")
    assert jobs_in_redis(connection) == 0


def test_a_failed_row_is_shown_with_its_reason(trial: Run, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a", "x" * 20_000), batch_line("b")])
    done = trial("run", "rows.jsonl", "--dry-run", "2", "--progress", "none")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["trial"]["failed"] == 1
    assert any(line.startswith("a: ") and "tokens" in line for line in done.stderr.splitlines())


def test_a_trial_ends_with_the_worker_that_was_started_for_it(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 2)
    announce(connection, ALIAS)

    def ended() -> None:
        raise RuntimeError("the worker has ended")

    options = RunOptions.of(str(tmp_path / "rows.jsonl"), {})
    with Producer(redis_url) as producer, pytest.raises(RuntimeError, match="has ended"):
        try_rows(producer, options, 2, "none", ended)
    assert jobs_in_redis(connection) == 0


def test_a_limit_bounds_what_is_tried(trial: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 9)
    done = trial("run", "rows.jsonl", "--dry-run", "5", "--limit", "3", "--progress", "none")
    found = json.loads(done.stdout)
    assert (found["rows"], found["trial"]["rows"]) == (3, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["-", "--format", "text", "--dry-run", "2"],
            "--dry-run N reads the input twice; save stdin in a file",
        ),
        (
            ["rows.jsonl", "--dry-run", "few"],
            "--dry-run: got 'few'; give a whole number of at least 0",
        ),
    ],
)
def test_what_cannot_be_tried_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", 1)
    done = run("run", *given, input="text\n")
    assert (done.exit_code, done.stderr) == (2, f"omlx-submit: {said}\n")
