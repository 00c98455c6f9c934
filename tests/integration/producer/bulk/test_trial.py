"""`omlx-submit run --dry-run N`: a few rows tried, and an estimate for all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from omlx_producer import Producer
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.trial import try_rows
from omlx_producer.client.workers import read_workers
from omlx_producer.wire import GenerationRequest
from tests.helpers import fake_engine, workers
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


BOUND, FREE = json.dumps({"items": [1, 2]}), 'Three:\n[1, 2, {"a": [3]}] and no more, [see] [4]'


class Answering(fake_engine.FakeEngine):
    """Answers two items with a schema, and three or none in free text."""

    def prepare(self, request: GenerationRequest, job_id: str) -> list[fake_engine.Row]:
        rows = super().prepare(request, job_id)
        assert request.temperature == 0.5, "all else of the request stays"
        texts = {"a": BOUND, "b": FREE, "c": "none [", "d": f"```json\n{BOUND}\n```"}
        text = BOUND if request.constraint else texts[chr(rows[0].prompt[-1])]
        return [replace(row, prompt=list(map(ord, text))) for row in rows]


@pytest.fixture
def schema_trial(
    run: Run, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "FakeEngine", Answering)
    monkeypatch.setattr(
        fake_engine, "expected", lambda row: (row.prompt, "".join(map(chr, row.prompt)))
    )
    with running_worker(redis_url), redis.Redis.from_url(redis_url) as connection:
        wait_for(lambda: read_workers(connection, ALIAS))
        yield run


FORMAT = {"type": "json_schema", "json_schema": {"name": "items", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("options", "body"),
    [(["--schema", '{"type": "object"}'], {}), ([], {"response_format": FORMAT})],
)
def test_rows_with_a_schema_are_compared_to_the_same_rows_without_it(
    schema_trial: Run,
    connection: redis.Redis,
    tmp_path: Path,
    options: list[str],
    body: dict[str, Any],
) -> None:
    more = {"max_tokens": 80, "temperature": 0.5, **body}
    rows = [batch_line(id_, f"prompt {id_}", **more) for id_ in "abcd"]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    done = schema_trial("run", "rows.jsonl", "--dry-run", "9", "--progress", "none", *options)
    assert done.exit_code == 0, done.output
    free = sum(map(len, (BOUND, FREE, "none [", f"```json\n{BOUND}\n```")))
    assert json.loads(done.stdout)["trial"]["schema"] == {
        "rows": 4,
        "differ": 2,
        "without_json": 1,
        "with_schema": {"items": 8, "completion_tokens": 4 * len(BOUND)},
        "without_schema": {"items": 7, "completion_tokens": free},
    }
    assert (
        f"""\
                    items    tokens
with the schema         8  {4 * len(BOUND):>8}
without it              7  {free:>8}
2 of 4 rows differ; without the schema 3 of 4 hold complete JSON
all 4 rows"""
        in done.stderr
    )
    assert jobs_in_redis(connection) == 0


def test_a_trial_without_a_schema_compares_nothing(trial: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 2, structured_outputs={"choice": ["a", "b"]})
    done = trial("run", "rows.jsonl", "--dry-run", "2", "--progress", "none")
    assert "schema" not in json.loads(done.stdout)["trial"]
    assert "differ" not in done.stderr


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
