"""RQ's commands and deadlines act on running jobs, within a decode step."""

from __future__ import annotations

import time

import pytest
from redis import Redis
from rq.command import send_shutdown_command, send_stop_job_command
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend

from tests.helpers.workers import (
    enqueue,
    events,
    is_over,
    queue,
    rq_info,
    run_burst,
    running_worker,
    started,
    status,
    wait_for,
)


def test_stop_job_ends_a_running_job_and_leaves_the_others(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue(connection, max_completion_tokens=200) for _ in range(3)]
    with running_worker(redis_url, step_seconds=0.01):
        wait_for(lambda: len(events(connection, jobs[1].id)) > 3)
        send_stop_job_command(connection, jobs[1].id, serializer=JSONSerializer)
        began = time.monotonic()
        wait_for(lambda: is_over(jobs[1]))
        assert time.monotonic() - began < 1
        assert status(jobs[1]) == "stopped"
        assert events(connection, jobs[1].id)[-1].type == "cancelled"
        assert jobs[1] in queue(connection).failed_job_registry
        wait_for(lambda: is_over(jobs[0]) and is_over(jobs[2]))
    assert status(jobs[0]) == status(jobs[2]) == "finished"


def test_commands_that_are_nested_too_deeply_are_ignored(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with running_worker(redis_url) as worker:
        wait_for(lambda: worker.pubsub_thread is not None)
        connection.publish(worker.pubsub_channel_name, "[" * 100_000)
        wait_for(lambda: "unreadable command" in caplog.text)
        send_shutdown_command(connection, worker.name)
        worker.test_thread.join(20)
        assert not worker.test_thread.is_alive()


def test_cancelling_a_running_job_through_rq_stops_it(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, max_completion_tokens=5000)
    with running_worker(redis_url, step_seconds=0.01) as worker:
        wait_for(lambda: len(events(connection, job.id)) > 3)
        job.cancel()
        wait_for(lambda: events(connection, job.id)[-1].type == "cancelled")
        wait_for(lambda: not worker.test_engine.states)
    assert status(job) == "canceled"
    assert started(connection) == 0


def test_a_deleted_running_job_is_dropped(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, max_completion_tokens=5000)
    with running_worker(redis_url, step_seconds=0.01) as worker:
        wait_for(lambda: len(events(connection, job.id)) > 3)
        job.delete()
        wait_for(lambda: not worker.test_engine.states)
    assert not connection.exists(job.key)


def test_a_job_that_runs_longer_than_its_timeout_fails(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, max_completion_tokens=5000, job_timeout=1)
    run_burst(redis_url, step_seconds=0.01)
    assert status(job) == "failed"
    assert "timeout of 1 s" in job.latest_result().exc_string


def test_a_suspended_worker_takes_nothing_until_resumed(redis_url: str, connection: Redis) -> None:
    suspend(connection)
    with running_worker(redis_url):
        job = enqueue(connection)
        wait_for(lambda: " suspended " in rq_info(redis_url))
        assert status(job) == "queued"
        resume(connection)
        wait_for(lambda: is_over(job))


def test_the_shutdown_command_drains_the_worker(redis_url: str, connection: Redis) -> None:
    jobs = [enqueue(connection, max_completion_tokens=40) for _ in range(3)]
    with running_worker(redis_url, max_rows=2, step_seconds=0.01) as worker:
        wait_for(lambda: len(events(connection, jobs[1].id)) > 2)
        send_shutdown_command(connection, worker.name)
        worker.test_thread.join(10)
        assert not worker.test_thread.is_alive()
    assert [status(job) for job in jobs] == ["finished", "finished", "queued"]
