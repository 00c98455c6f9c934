"""What RQ's documentation promises about jobs, kept by this worker too."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from redis import Redis
from rq import Queue, Retry
from rq.cli import main as rq_cli
from rq.exceptions import NoSuchJobError
from rq.group import Group
from rq.job import Job
from rq.serializers import JSONSerializer

from omlx_producer.wire import JOB_FUNCTION, events_key
from tests.helpers.leases import claim, table
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    events,
    fetch,
    is_over,
    queue,
    rq_info,
    run_burst,
    running_worker,
    started,
    status,
    wait_for,
)

SERIALIZER = "rq.serializers.JSONSerializer"


def rq_command(url: str, *arguments: str) -> str:
    result = CliRunner().invoke(rq_cli, [arguments[0], "--url", url, *arguments[1:]])
    assert result.exit_code == 0, result.output
    return result.output


# Groups


def test_a_group_knows_its_jobs_until_they_are_gone(redis_url: str, connection: Redis) -> None:
    data = [
        Queue.prepare_data(
            JOB_FUNCTION, kwargs={"request": {"model": ALIAS, "prompt": "x"}}, result_ttl=ttl
        )
        for ttl in (500, 0)
    ]
    group = Group.create(connection, "evening")
    kept, gone = group.enqueue_many(queue(connection), data)
    run_burst(redis_url)
    assert [job.id for job in Group.fetch("evening", connection).get_jobs()] == [kept.id]
    assert status(kept) == "finished"
    with pytest.raises(NoSuchJobError):
        fetch(connection, gone.id)
    kept.delete()
    Group.clean_registries(connection)
    assert Group.all(connection) == []


# Lifetimes


def test_a_failure_is_kept_for_its_ttl(redis_url: str, connection: Redis) -> None:
    short, long = (enqueue(connection, n="two", failure_ttl=ttl) for ttl in (50, -1))
    run_burst(redis_url)
    assert 0 < connection.ttl(short.key) <= 50
    assert 0 < connection.ttl(events_key(short.id)) <= 50
    assert connection.ttl(long.key) == -1
    assert queue(connection).failed_job_registry.count == 2


def test_a_job_that_waits_longer_than_its_ttl_never_runs(redis_url: str, connection: Redis) -> None:
    request = {"model": ALIAS, "prompt": "x"}
    job = queue(connection).enqueue(JOB_FUNCTION, kwargs={"request": request}, ttl=1)
    wait_for(lambda: not connection.exists(job.key))
    assert run_burst(redis_url).most_rows == 0


@pytest.mark.slow
def test_a_job_that_started_within_its_ttl_does_not_expire_while_it_runs(
    redis_url: str, connection: Redis
) -> None:
    request = {"model": ALIAS, "prompt": "x", "max_completion_tokens": 60}
    job = queue(connection).enqueue(JOB_FUNCTION, kwargs={"request": request}, ttl=1)
    run_burst(redis_url, step_seconds=0.03)
    assert status(job) == "finished"


# Jobs that kill their workers


def test_a_job_that_kills_its_workers_is_not_retried(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, retry=Retry(max=5))
    connection.hset(job.key, mapping={"omlx_deaths": "a b c d e ", "omlx_streamed": 3})
    assert run_burst(redis_url).most_rows == 0
    assert status(job) == "failed"
    said = "worker died 5 times while it ran, 3 times with no other job"
    assert said in job.latest_result().exc_string
    assert connection.hmget(job.key, "omlx_deaths", "omlx_streamed") == [None, None]


# Commands of `rq`


def test_rq_requeue_runs_failed_jobs_again(redis_url: str, connection: Redis) -> None:
    jobs = [enqueue(connection, n="two") for _ in range(3)]
    run_burst(redis_url)
    good = JSONSerializer.dumps(
        (JOB_FUNCTION, None, (), {"request": {"model": ALIAS, "prompt": "x"}})
    )
    for job in jobs:
        connection.hset(job.key, "data", good)
    rq_command(redis_url, "requeue", "--queue", queue(connection).name, "--all", "-S", SERIALIZER)
    run_burst(redis_url)
    assert [status(job) for job in jobs] == ["finished"] * 3
    assert queue(connection).failed_job_registry.count == 0
    for job in jobs:
        assert [event.type for event in events(connection, job.id)].count("failed") == 0
        assert events(connection, job.id)[-1].type == "done"


@pytest.mark.slow
def test_rq_suspend_lets_running_jobs_finish_and_rq_resume_takes_new_ones(
    redis_url: str, connection: Redis
) -> None:
    running = enqueue(connection, max_completion_tokens=50)
    with running_worker(redis_url, step_seconds=0.01):
        wait_for(lambda: len(events(connection, running.id)) > 2)
        rq_command(redis_url, "suspend")
        waiting = enqueue(connection)
        wait_for(lambda: is_over(running))
        wait_for(lambda: " suspended " in rq_info(redis_url))
        assert (status(running), status(waiting)) == ("finished", "queued")
        rq_command(redis_url, "resume")
        wait_for(lambda: is_over(waiting))


def test_rq_empty_drops_what_waits_and_leaves_what_runs(redis_url: str, connection: Redis) -> None:
    jobs = [enqueue(connection, max_completion_tokens=50) for _ in range(3)]
    with running_worker(redis_url, max_rows=1, step_seconds=0.01):
        wait_for(lambda: len(events(connection, jobs[0].id)) > 2)
        rq_command(redis_url, "empty", queue(connection).name, "-S", SERIALIZER)
        wait_for(lambda: is_over(jobs[0]))
    assert [connection.exists(job.key) for job in jobs] == [1, 0, 0]
    assert started(connection) == 0


def test_rq_info_agrees_with_the_truth_after_every_kind_of_ending(
    redis_url: str, connection: Redis
) -> None:
    good = [enqueue(connection) for _ in range(3)]
    for _ in range(2):
        enqueue(connection, n="two")
    cancelled = enqueue(connection)
    cancelled.cancel()
    deleted = enqueue(connection)
    deleted.delete()
    run_burst(redis_url)
    assert "queue omlx:fake:default 0, 0 executing, 3 finished, 2 failed" in rq_info(redis_url)
    assert [status(job) for job in (*good, cancelled)] == [*["finished"] * 3, "canceled"]


def test_a_job_enqueued_to_the_front_goes_first(connection: Redis) -> None:
    enqueue(connection)
    kwargs = {"request": {"model": ALIAS, "prompt": "x"}}
    first = queue(connection).enqueue(JOB_FUNCTION, kwargs=kwargs, at_front=True)
    assert claim(table(connection))[0].id == first.id


# Serializers


def test_rqs_plain_fetch_shows_a_job_and_with_json_its_result_too(
    redis_url: str, connection: Redis
) -> None:
    job, bad = enqueue(connection), enqueue(connection, n="two")
    run_burst(redis_url)
    assert Job.fetch(job.id, connection=connection).get_status() == "finished"
    assert "n: got" in Job.fetch(bad.id, connection=connection).latest_result().exc_string
    whole = Job.fetch(job.id, connection=connection, serializer="json")
    assert whole.return_value() == job.return_value()
    assert whole.kwargs == {"request": {"model": ALIAS, "prompt": "hello"}}
