"""omlx-submit run with --at and --until."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import redis
from click.testing import Result

from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.runfile import read_settings
from omlx_producer.bulk.shape import Shape
from tests.helpers.bulk_runs import ids, write_rows
from tests.helpers.workers import running_worker, wait_for
from tests.integration.producer.bulk.conftest import Run


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def clock(hours: float) -> str:
    """The time of day that many hours from now."""
    return time.strftime("%H:%M", time.localtime(time.time() + 3600 * hours))


def test_a_run_waits_for_its_hours_and_says_so(
    run: Run, redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 3)
    ended: list[Result] = []
    options = ("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none", "--ordered")
    hours = ("--at", clock(2), "--until", clock(3))
    thread = threading.Thread(target=lambda: ended.append(run(*options, *hours)))
    with running_worker(redis_url) as worker:
        thread.start()
        [key] = wait_for(lambda: [*connection.scan_iter("omlx:batch:*:rows")])
        batch = Batch(connection, f"batch-{key.decode().split(':')[2]}")
        assert (batch.read().hours, batch.read().left) == ("-".join(hours[1::2]), 3)
        assert worker.decode_thread.counters.steps == 0
        connection.hset(batch.key, "hours", "")
        thread.join(20)
    [result] = ended
    assert result.exit_code == 0
    assert f"the rows begin at {time.strftime('%Y-%m-%d')[:4]}" in result.stderr
    assert ids(tmp_path / "out.jsonl") == ["r0", "r1", "r2"]


def test_a_run_without_hours_lifts_those_of_the_same_run_before(
    run: Run, redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 3)
    options = ("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none")
    thread = threading.Thread(target=run, args=(*options, "--at", clock(2)), daemon=True)
    thread.start()
    [key] = wait_for(lambda: [*connection.scan_iter("omlx:batch:*:rows")])
    assert float(connection.hget(key.removesuffix(b":rows"), "opens_at") or 0) > time.time()
    assert (read_settings(tmp_path / "out.jsonl") or {})["at"] == clock(2)
    connection.hset(key.removesuffix(b":rows"), "opens_at", "")
    with running_worker(redis_url):
        thread.join(20)
        write_rows(tmp_path / "rows.jsonl", 5)
        assert run(*options).exit_code == 0
    assert sorted(ids(tmp_path / "out.jsonl")) == [f"r{n}" for n in range(5)]


def test_a_detached_batch_keeps_its_hours_and_shows_until_when_it_rests(
    run: Run, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 2)
    hours = ("--at", clock(2), "--until", clock(3))
    made = run("run", "rows.jsonl", "--detach", *hours)
    batch = made.stdout.strip()
    assert "the rows begin at" in made.stderr
    shown = dict(line.split(maxsplit=1) for line in run("status", batch).stdout.splitlines())
    assert shown["hours"] == "-".join(hours[1::2])
    assert shown["rests_until"][11:16] == clock(2)
    state = json.loads(run("status", batch, "--json").stdout)
    assert state["rests_until"] == pytest.approx(time.time() + 7200, abs=90)
    assert "resting" in run("batches").stdout


def given_at(begun: float, **options: str) -> RunOptions:
    return RunOptions("rows.jsonl", "jsonl", Shape(), begun=begun, **options)


def test_a_command_that_is_repeated_after_its_hour_does_not_wait_for_the_next_day() -> None:
    hour = 3600.0
    evening = time.mktime((2026, 1, 5, 21, 0, 0, 0, 0, -1))
    earlier = given_at(evening, at="22:00")
    night, next_evening = given_at(evening + 4 * hour, at="22:00"), evening + 24 * hour
    assert night.begun_as(earlier).when == earlier.when
    assert night.begun_as(earlier).when.rests_until(night.begun) is None
    late = given_at(next_evening, at="22:00").begun_as(earlier)
    assert late.when.rests_until(next_evening) == evening + 25 * hour
    other = given_at(evening + 4 * hour, at="23:00").begun_as(earlier)
    assert other.when.rests_until(other.begun) == evening + 26 * hour


@pytest.mark.parametrize("given", [("--at", "25:00"), ("--until", "late")])
def test_what_is_no_time_of_day_is_told_before_anything_runs(
    run: Run, tmp_path: Path, given: tuple[str, str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", 2)
    for where in (("-o", "out.jsonl"), ("--detach",)):
        result = run("run", "rows.jsonl", *where, *given)
        said = f"{given[0]}: got '{given[1]}'; give a time of day, as in 22:00"
        assert (result.exit_code, said in result.stderr) == (2, True)
    assert not (tmp_path / "out.jsonl").exists()
