"""A job with a rate limit gives its slot back, however it ends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from redis import Redis
from rq import RateLimit, Retry
from rq.command import send_stop_execution_command, send_stop_job_command
from rq.job import Job
from rq.rate_limit import RateLimitRegistry
from rq.serializers import JSONSerializer

from omlx_producer import Producer
from omlx_producer.protocol import JOB_FUNCTION
from tests.helpers.fake_engine import BREAKS_PREPARE
from tests.helpers.leases import claim, kill, table
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    events,
    is_over,
    queue,
    run_burst,
    running_worker,
    status,
    wait_for,
)

ONE = RateLimit("gpu", 1)


def slots(connection: Redis) -> list[str]:
    return RateLimitRegistry("gpu", connection).get_allowed_job_ids()


def limited(connection: Redis, *args: Any, **options: Any) -> Job:
    return enqueue(connection, *args, rate_limit=ONE, **options)


def test_jobs_of_one_limit_run_one_after_the_other(redis_url: str, connection: Redis) -> None:
    jobs = [limited(connection, max_completion_tokens=5) for _ in range(3)]
    assert [status(job) for job in jobs] == ["queued", "rate_limited", "rate_limited"]
    engine = run_burst(redis_url)
    wait_for(lambda: all(map(is_over, jobs)))
    assert [status(job) for job in jobs] == ["finished"] * 3
    assert engine.most_rows == 1
    assert slots(connection) == []


@pytest.mark.parametrize(
    ("prompt", "options", "end"),
    [("x", {"n": "two"}, "failed"), (BREAKS_PREPARE, {"retry": Retry(max=2)}, "failed")],
)
def test_a_failed_job_makes_room(
    redis_url: str, connection: Redis, prompt: str, options: dict[str, Any], end: str
) -> None:
    jobs = [limited(connection, prompt, **options), limited(connection)]
    with running_worker(redis_url):
        wait_for(lambda: all(map(is_over, jobs)))
    assert [status(job) for job in jobs] == [end, "finished"]


def stop(job: Job) -> None:
    send_stop_job_command(job.connection, job.id, serializer=JSONSerializer)


def stop_execution(job: Job) -> None:
    (execution,) = job.get_executions()
    send_stop_execution_command(job.connection, job.id, execution.id)


@pytest.mark.parametrize("end", [stop, stop_execution, Job.cancel, Job.delete])
def test_a_job_that_somebody_ends_while_it_runs_makes_room(
    redis_url: str, connection: Redis, end: Any
) -> None:
    jobs = [limited(connection, max_completion_tokens=5000), limited(connection)]
    with running_worker(redis_url, step_seconds=0.01):
        wait_for(lambda: len(events(connection, jobs[0].id)) > 1)
        end(jobs[0])
        wait_for(lambda: is_over(jobs[1]))
    assert status(jobs[1]) == "finished"
    wait_for(lambda: slots(connection) == [])


def test_a_cancelled_job_that_its_worker_gives_back_makes_room_and_ends_its_stream(
    connection: Redis,
) -> None:
    jobs = [limited(connection), limited(connection)]
    leases = table(connection)
    claimed = claim(leases)
    jobs[0].cancel()
    assert leases.give_back(claimed) == 0
    assert slots(connection) == [jobs[1].id]
    assert [event.type for event in events(connection, jobs[0].id)] == ["cancelled"]
    assert len(leases) == 0


def test_a_waiting_job_that_is_cancelled_makes_room(redis_url: str, connection: Redis) -> None:
    jobs = [limited(connection) for _ in range(3)]
    for job in jobs[:2]:
        assert Producer(connection).cancel(job.id) == "cancelled"
    assert [status(job) for job in jobs] == ["canceled", "canceled", "queued"]
    run_burst(redis_url)
    assert status(jobs[2]) == "finished"


def test_a_job_of_a_killed_worker_keeps_its_slot_until_it_ends(
    redis_url: str, connection: Redis
) -> None:
    jobs = [limited(connection), limited(connection)]
    dead = table(connection, "dead")
    claim(dead)
    kill(connection, dead)
    assert slots(connection) == [jobs[0].id]
    with running_worker(redis_url):
        wait_for(lambda: all(map(is_over, jobs)))
    assert [status(job) for job in jobs] == ["finished", "finished"]


def test_a_job_that_becomes_due_takes_a_free_slot(redis_url: str, connection: Redis) -> None:
    kwargs = {"request": {"model": ALIAS, "prompt": "x"}}
    job = queue(connection).enqueue_in(
        timedelta(minutes=5), JOB_FUNCTION, kwargs=kwargs, rate_limit=ONE
    )
    with running_worker(redis_url) as worker:
        wait_for(lambda: worker.last_cleaned_at)
        connection.zadd(queue(connection).scheduled_job_registry.key, {job.id: 1})
        wait_for(lambda: is_over(job), 5)
    assert status(job) == "finished"


def test_a_job_that_becomes_due_waits_for_a_slot(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_worker.control.rq_record.SCHEDULE_SECONDS", 0.05)
    kwargs = {"request": {"model": ALIAS, "prompt": "x"}}
    first = limited(connection, max_completion_tokens=5000)
    later = queue(connection).enqueue_in(
        timedelta(minutes=5), JOB_FUNCTION, kwargs=kwargs, rate_limit=ONE
    )
    with running_worker(redis_url, step_seconds=0.01):
        wait_for(lambda: events(connection, first.id))
        connection.zadd(queue(connection).scheduled_job_registry.key, {later.id: 1})
        wait_for(lambda: status(later) == "rate_limited")
        stop(first)
        wait_for(lambda: is_over(later))
    assert status(later) == "finished"


def test_a_due_job_takes_a_free_slot_although_the_call_that_moves_it_is_repeated(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = {"request": {"model": ALIAS, "prompt": "x"}}
    job = queue(connection).enqueue_in(
        timedelta(minutes=5), JOB_FUNCTION, kwargs=kwargs, rate_limit=ONE
    )
    with running_worker(redis_url) as worker:
        wait_for(lambda: worker.last_cleaned_at)
        schedule = worker._schedule

        def repeats(**arguments: Any) -> Any:
            schedule(**arguments)
            return schedule(**arguments)

        monkeypatch.setattr(worker, "_schedule", repeats)
        connection.zadd(queue(connection).scheduled_job_registry.key, {job.id: 1})
        wait_for(lambda: is_over(job), 5)
    assert status(job) == "finished"


def test_maintenance_frees_a_slot_that_was_lost(redis_url: str, connection: Redis) -> None:
    jobs = [limited(connection), limited(connection)]
    connection.delete(jobs[0].key)
    queue(connection).empty()
    with running_worker(redis_url):
        wait_for(lambda: is_over(jobs[1]))
    assert status(jobs[1]) == "finished"


def test_a_lost_job_whose_hash_is_of_another_type_leaves_the_table(connection: Redis) -> None:
    job = limited(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    connection.delete(job.key)
    connection.set(job.key, "something else")
    assert leases.renew() == {job.id: "deleted"}
    leases.lose(claimed)
    assert len(leases) == 0
