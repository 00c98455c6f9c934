"""Hours: of batches, whose rows wait for them, and of workers, which rest outside of theirs."""

from __future__ import annotations

import itertools
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from redis import Redis
from rich.console import Console

from omlx_producer import Producer
from omlx_producer.bulk.batch import Batch
from omlx_producer.cli.overview import draw_overview
from omlx_producer.operate import read_overview
from omlx_producer.wire import Hours, When
from tests.helpers.leases import claim, commit, done, kill, sweep, table
from tests.helpers.workers import (
    enqueue,
    events,
    is_over,
    run_burst,
    running_worker,
    status,
    streamed_text,
    wait_for,
)
from tests.integration.producer.bulk.test_collector import rows

HOUR = 3600


def hours(connection: Redis, start: float, end: float, offset: int = 0) -> When:
    """Hours around now, on a clock with this offset from UTC; in hours."""
    now = connection.time()[0] + offset
    clocks = [int(now + HOUR * shift) % 86_400 // 60 * 60 for shift in (start, end)]
    return When(hours=Hours(*clocks), offsets=f"0:{offset}")


def upload(connection: Redis, when: When, count: int = 2, start: int = 0) -> Batch:
    batch = Batch.create(connection, when=when)
    batch.upload(rows(count, start))
    return batch


def test_rows_begin_in_the_hours_of_their_batch_alone(connection: Redis) -> None:
    windows = [(-1.0, 1.0), (1.0, 2.0), (-2.0, -1.0), (-12.0, 11.0), (-0.5, 23.0), (2.0, 1.0)]
    for (start, end), offset in itertools.product(windows, (0, 5 * HOUR + 1800, -9 * HOUR)):
        when = hours(connection, start, end, offset)
        batch = upload(connection, when, 1)
        leases = table(connection)
        claimed = claim(leases)
        assert (
            bool(claimed)
            == (batch.read().rests_until is None)
            == (when.rests_until(time.time()) is None)
        )
        for job in claimed:
            commit(leases, job, done(job.id))
        batch.cancel()


def test_the_clocks_of_a_batch_change_when_its_offsets_say_so(connection: Redis) -> None:
    now = connection.time()[0]
    when = hours(connection, -1, 1)
    for changed, open_ in ((now - 60, False), (now + 60, True)):
        later = When(hours=when.hours, offsets=f"0:0 {changed}:{-4 * HOUR}")
        batch = upload(connection, later, 1)
        assert len(claim(table(connection))) == open_
        batch.cancel()


def test_a_batch_that_waits_for_its_first_hour_keeps_no_other_waiting(connection: Redis) -> None:
    resting = upload(connection, When(opens_at=time.time() + HOUR))
    upload(connection, When(opens_at=time.time() - HOUR), 3)
    assert len(claim(table(connection), 9)) == 3
    state = resting.read()
    assert (state.state, state.left) == ("open", 2)
    assert state.rests_until == pytest.approx(time.time() + HOUR, abs=60)
    connection.hset(resting.key, "opens_at", int(time.time()) - 1)
    assert len(claim(table(connection), 9)) == 2


def test_a_row_whose_worker_dies_waits_for_the_next_hours(connection: Redis) -> None:
    batch, leases = upload(connection, hours(connection, -1, 1)), table(connection)
    [row] = claim(leases)
    connection.hset(batch.key, "hours", str(hours(connection, 1, 2).hours))
    kill(connection, leases)
    other = enqueue(connection, priority="bulk")
    assert [job.id for job in claim(table(connection), 9)] == [other.id]
    connection.hset(batch.key, "hours", "")
    assert next(job.id for job in claim(table(connection), 9)) == row.id


def test_rows_of_a_batch_that_rests_expire_at_the_end_of_their_window(
    redis_url: str, connection: Redis
) -> None:
    batch = Batch.create(connection, when=When(opens_at=time.time() + HOUR))
    batch.upload(rows(2, completion_window="1s"))
    with running_worker(redis_url, lease_seconds=1.0):
        wait_for(lambda: batch.read().over)
    assert (batch.read().state, batch.read().failures) == ("expired", {"expired": 2})


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """Until when workers with hours rest."""
    monkeypatch.setattr("omlx_worker.control.status.WRITE_SECONDS", 0.05)
    until: dict[str, float | None] = {"until": None}
    monkeypatch.setattr(Hours, "rests_until", lambda *_: until["until"])
    return until


def worker_of(connection: Redis) -> dict[str, Any]:
    [worker] = read_overview(connection)[0]["workers"]
    return dict(worker)


def test_a_worker_whose_hours_end_gives_its_jobs_back_and_goes_on_with_them(
    redis_url: str, connection: Redis, rest: dict[str, float | None]
) -> None:
    with running_worker(
        redis_url, step_seconds=0.01, hours="22:00-07:00", drain_timeout=0.1, name="mac-1"
    ):
        job = enqueue(connection, max_completion_tokens=60, seed=1)
        bulk = enqueue(connection, max_completion_tokens=60, seed=1, priority="bulk")
        wait_for(lambda: len(events(connection, job.id)) > 2)
        rest["until"] = datetime(2026, 1, 5, 22, tzinfo=UTC).timestamp()
        wait_for(lambda: (status(job), status(bulk)) == ("queued", "queued"))
        wait_for(lambda: worker_of(connection)["state"] == "resting")
        later = enqueue(connection, priority="high")
        console = Console(width=100, record=True)
        console.print(draw_overview(read_overview(connection)))
        assert "mac-1 rests until 2026-01-05 22:00:00 UTC (--hours)" in console.export_text()
        told, text = len(events(connection, job.id)), streamed_text(connection, job.id)
        assert events(connection, bulk.id), "what bulk jobs have produced is kept, too"
        assert status(later) == "queued"
        rest["until"] = None
        wait_for(lambda: all(map(is_over, (job, bulk, later))))
    assert len(events(connection, job.id)) > told
    assert streamed_text(connection, job.id).startswith(text)
    with Producer(connection) as producer:
        whole = producer.result(job.id)["choices"][0]["text"]
        assert whole == streamed_text(connection, job.id)
        connection.flushdb()
        again = enqueue(connection, max_completion_tokens=60, seed=1)
        run_burst(redis_url)
        assert producer.result(again.id)["choices"][0]["text"] == whole


def test_short_jobs_end_within_the_grace_after_a_workers_hours(
    redis_url: str, connection: Redis, rest: dict[str, float | None]
) -> None:
    with running_worker(redis_url, step_seconds=0.01, hours="22:00-07:00"):
        job = enqueue(connection, max_completion_tokens=60)
        wait_for(lambda: len(events(connection, job.id)) > 2)
        rest["until"] = time.time() + HOUR
        wait_for(lambda: worker_of(connection)["state"] == "resting")
        wait_for(lambda: is_over(job))
    assert status(job) == "finished"


@pytest.mark.slow
def test_a_worker_that_rests_between_steps_for_longer_than_its_leases_keeps_them(
    redis_url: str, connection: Redis
) -> None:
    with running_worker(redis_url, step_seconds=0.02, duty=0.01, lease_seconds=1.0):
        job = enqueue(connection, max_completion_tokens=3)
        while not is_over(job):
            assert sweep(table(connection, "sweeper")) == []
            time.sleep(0.05)
    assert status(job) == "finished"
