"""What follows the end of a job, and what no worker here serves."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis
from rq import Callback, RateLimit, Repeat, Retry
from rq.command import send_stop_job_command
from rq.job import Dependency, JobStatus
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from omlx_producer.client.outcome import EXPIRED
from omlx_producer.wire import End, EndEvent
from omlx_worker.queue.ending import Commit, Ending
from tests.helpers.fake_engine import BREAKS_PREPARE
from tests.helpers.leases import claim, commit, failed, table
from tests.helpers.workers import (
    enqueue,
    events,
    is_over,
    queue,
    run_burst,
    running_worker,
    status,
    wait_for,
)


def be_called(job: Any, connection: Redis, *_: Any) -> None:
    connection.set("called", job.id)


CALLED = Callback("tests.integration.worker.test_rq_endings.be_called")


def test_a_retry_that_asks_for_the_front_gets_it(connection: Redis) -> None:
    job = enqueue(connection, retry=Retry(max=1, enqueue_at_front=True))
    leases = table(connection)
    (claimed,) = claim(leases)
    waiting = enqueue(connection)
    assert commit(leases, claimed, failed(job.id)) is Commit.RETRIED
    assert queue(connection).job_ids == [job.id, waiting.id]


def test_a_job_is_retried_as_often_as_it_says(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, BREAKS_PREPARE, retry=Retry(max=2))
    run_burst(redis_url)
    job.refresh()
    assert status(job) == "failed"
    assert job.retries_left == 0
    assert [event.type for event in events(connection, job.id)] == ["failed"]


def test_an_invalid_job_is_not_retried(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, n="two", retry=Retry(max=2))
    run_burst(redis_url)
    assert status(job) == "failed"
    assert len(job.results()) == 1


def test_a_stopped_job_is_not_retried(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, max_completion_tokens=5000, retry=Retry(max=2))
    with running_worker(redis_url, step_seconds=0.01):
        wait_for(lambda: len(events(connection, job.id)) > 3)
        send_stop_job_command(connection, job.id, serializer=JSONSerializer)
        wait_for(lambda: is_over(job))
    assert status(job) == "stopped"


@pytest.mark.parametrize("end", [EXPIRED, End("quarantined", "its workers died")])
def test_what_fails_again_is_not_retried(connection: Redis, end: End) -> None:
    job = enqueue(connection, retry=Retry(max=2))
    leases = table(connection)
    (claimed,) = claim(leases)
    assert commit(leases, claimed, Ending(EndEvent.of(job.id, 0, end))) is Commit.DONE
    assert status(job) == "failed"


def test_a_commit_that_is_repeated_after_a_lost_answer_retries_once(connection: Redis) -> None:
    job = enqueue(connection, retry=Retry(max=3))
    leases = table(connection)
    (claimed,) = claim(leases)
    assert commit(leases, claimed, failed(job.id)) is Commit.RETRIED
    assert commit(leases, claimed, failed(job.id)) is Commit.LOST
    job.refresh()
    assert (status(job), job.retries_left, job.results()) == ("queued", 2, [])
    assert queue(connection).job_ids == [job.id]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("success_callback_name", {"on_success": CALLED}),
        ("failure_callback_name", {"on_failure": CALLED}),
        ("stopped_callback_name", {"on_stopped": CALLED}),
        ("webhooks", {"webhooks": [Webhook("http://127.0.0.1:1/", JobStatus.FINISHED)]}),
        ("repeats_left", {"repeat": Repeat(times=2)}),
        ("rate_limit_key", {"rate_limit": RateLimit("gpu", 1)}),
        ("retry_intervals", {"retry": Retry(max=2, interval=[1, 2])}),
    ],
)
def test_a_job_with_what_no_worker_serves_fails_with_a_sentence_and_runs_nothing(
    redis_url: str,
    connection: Redis,
    field: str,
    options: dict[str, Any],
) -> None:
    job = enqueue(connection, **{"retry": Retry(max=2), **options})
    assert run_burst(redis_url, name="mac-1").most_rows == 0
    assert status(job) == "failed"
    said = job.latest_result().exc_string
    assert said.startswith(f"{field}: ")
    assert "examples/after_each_job.py" in said
    assert not connection.exists("called")


def test_a_job_that_others_depend_on_fails_and_so_does_one_whose_turn_came(
    redis_url: str, connection: Redis
) -> None:
    first = enqueue(connection)
    second = enqueue(connection, depends_on=Dependency([first], allow_failure=True))
    run_burst(redis_url)
    assert first.latest_result().exc_string.startswith("dependents: ")
    assert status(second) == "deferred"
    # As a worker of RQ enqueues it.
    queue(connection).deferred_job_registry.remove(second)
    connection.hset(second.key, "status", "queued")
    connection.rpush(queue(connection).key, second.id)
    run_burst(redis_url)
    assert second.latest_result().exc_string.startswith("dependency_ids: ")


@pytest.mark.slow
def test_jobs_behind_a_rate_limit_fail_too_and_none_waits_for_ever(
    redis_url: str, connection: Redis
) -> None:
    first, second = (enqueue(connection, rate_limit=RateLimit("gpu", 1)) for _ in range(2))
    assert status(second) == "rate_limited"
    with running_worker(redis_url) as worker:
        wait_for(lambda: is_over(first))
        worker.last_cleaned_at = None
        worker._beat_at = float("-inf")
        wait_for(lambda: is_over(second))
    assert status(second) == "failed"
