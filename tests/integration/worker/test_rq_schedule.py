"""Jobs that are to run later run later, without a scheduler process."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from redis import Redis
from rq import Retry
from rq.job import Job
from rq.registry import ScheduledJobRegistry
from rq.scheduler import RQScheduler

from omlx_producer.wire import JOB_FUNCTION
from tests.helpers.fake_engine import BREAKS_PREPARE
from tests.helpers.leases import QUEUES, move_due
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    events,
    fetch,
    is_over,
    queue,
    run_burst,
    running_worker,
    status,
    wait_for,
)

KWARGS = {"request": {"model": ALIAS, "prompt": "x", "max_completion_tokens": 5}}


def registry(connection: Redis) -> ScheduledJobRegistry:
    return ScheduledJobRegistry(queue=queue(connection))


def make_due(connection: Redis, job: Job) -> None:
    """As if its time had come."""
    connection.zadd(registry(connection).key, {job.id: time.time() - 1})


def test_scheduled_jobs_run_when_their_time_has_come_and_not_before(
    redis_url: str, connection: Redis
) -> None:
    soon = timedelta(seconds=2)
    due = time.time() + soon.total_seconds()
    jobs = [
        queue(connection).enqueue_in(soon, JOB_FUNCTION, kwargs=KWARGS),
        queue(connection).enqueue_at(datetime.now(UTC) + soon, JOB_FUNCTION, kwargs=KWARGS),
    ]
    with running_worker(redis_url):
        assert {status(job) for job in jobs} == {"scheduled"}
        wait_for(lambda: all(map(is_over, jobs)))
    for job in jobs:
        job.refresh()
        # RQ's scores are whole seconds.
        assert job.started_at.timestamp() >= due - 1
        assert job.started_at.timestamp() >= job.enqueued_at.timestamp()
        assert status(job) == "finished"
    assert registry(connection).count == 0


@pytest.mark.slow
def test_a_retry_waits_for_its_interval(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, BREAKS_PREPARE, retry=Retry(max=2, interval=[1, 2]))
    with running_worker(redis_url):
        wait_for(
            lambda: (status(job), registry(connection).get_job_ids()) == ("scheduled", [job.id])
        )
        wait_for(lambda: is_over(job))
    job.refresh()
    assert (status(job), job.retries_left) == ("failed", 0)
    assert [event.type for event in events(connection, job.id)] == ["failed"]


def test_a_retry_that_asks_for_the_front_gets_it(redis_url: str, connection: Redis) -> None:
    retry = Retry(max=1, interval=60, enqueue_at_front=True)
    job = enqueue(connection, BREAKS_PREPARE, retry=retry)
    run_burst(redis_url)
    waiting = enqueue(connection)
    make_due(connection, job)
    assert move_due(connection) == [job.id]
    assert queue(connection).job_ids == [job.id, waiting.id]


def test_a_moved_job_reads_as_rqs_scheduler_leaves_it(connection: Redis) -> None:
    def prepare() -> Job:
        target = queue(connection)
        job = target.enqueue_in(timedelta(minutes=5), JOB_FUNCTION, kwargs=KWARGS, ttl=500)
        make_due(connection, job)
        return job

    theirs, fields = prepare(), []
    scheduler = RQScheduler(QUEUES, connection=connection)
    scheduler.prepare_registries(QUEUES)
    scheduler.enqueue_scheduled_jobs()
    ours = prepare()
    assert move_due(connection) == [ours.id]
    for job in (theirs, ours):
        fields.append({name: value for name, value in connection.hgetall(job.key).items() if value})
        assert 490 < connection.ttl(job.key) <= 500
        enqueued_at = fetch(connection, job.id).enqueued_at
        assert abs(enqueued_at - datetime.now(UTC)) < timedelta(seconds=20)
    assert fields[0].keys() == fields[1].keys()
    assert queue(connection).job_ids == [theirs.id, ours.id]


def test_what_has_ended_or_gone_meanwhile_only_leaves_the_registry(connection: Redis) -> None:
    target = queue(connection)
    jobs = [target.enqueue_in(timedelta(minutes=5), JOB_FUNCTION, kwargs=KWARGS) for _ in range(3)]
    for job in jobs:
        make_due(connection, job)
    connection.hset(jobs[0].key, "status", "canceled")
    connection.delete(jobs[1].key)
    assert move_due(connection) == [jobs[2].id]
    assert registry(connection).count == 0
    assert connection.hget(jobs[0].key, "status") == b"canceled"


def test_a_queue_with_a_scheduler_of_its_own_is_left_to_it(connection: Redis) -> None:
    job = queue(connection).enqueue_in(timedelta(minutes=5), JOB_FUNCTION, kwargs=KWARGS)
    make_due(connection, job)
    scheduler = RQScheduler([queue(connection).name], connection=connection)
    scheduler.acquire_locks()
    assert move_due(connection) == []
    scheduler.release_locks()
    assert move_due(connection) == [job.id]
