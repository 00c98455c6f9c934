"""Workers rest outside of their hours, and between their steps."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from redis import Redis
from rich.console import Console

from omlx_producer import Producer
from omlx_producer.cli.overview import draw_figures
from omlx_producer.figures import read_figures
from omlx_worker.hours import Hours
from tests.helpers.leases import sweep, table
from tests.helpers.turning import Loads, turning_worker
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

HOUR = 3600


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """Until when workers with hours rest."""
    monkeypatch.setattr("omlx_worker.control.status.WRITE_SECONDS", 0.05)
    until: dict[str, float | None] = {"until": None}
    monkeypatch.setattr(Hours, "rests_until", lambda *_: until["until"])
    return until


def state_of_worker(connection: Redis) -> str:
    [worker] = read_figures(connection)[0].workers
    return worker.state


@pytest.mark.slow
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
        wait_for(lambda: state_of_worker(connection) == "resting")
        later = enqueue(connection, priority="high")
        console = Console(width=100, record=True)
        console.print(draw_figures(read_figures(connection)))
        assert "mac-1: resting until 2026-01-05 22:00:00 UTC (--hours)" in console.export_text()
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
        wait_for(lambda: state_of_worker(connection) == "resting")
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


def test_of_several_models_those_that_are_not_loaded_rest_too(
    redis_url: str, connection: Redis, rest: dict[str, float | None]
) -> None:
    rest["until"] = datetime(2026, 1, 5, 22, tzinfo=UTC).timestamp()
    with turning_worker(redis_url, "ab", Loads(), hours="22:00-07:00"):
        models = wait_for(
            lambda: (found := read_figures(connection))[1:] and found[1].workers and found
        )
    told = "resting until 2026-01-05 22:00:00 UTC (--hours)"
    assert [model.held_up for model in models] == [
        f"the workers of {alias} are {told}" for alias in "ab"
    ]
