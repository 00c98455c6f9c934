"""What follows the end of a job: dependents, retries; and what no worker here serves."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis
from rq import Callback, Queue, RateLimit, Repeat, Retry
from rq.command import send_stop_job_command
from rq.job import Dependency, JobStatus
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from omlx_producer import Producer
from omlx_worker.queue.ending import Commit
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


def test_a_dependent_runs_after_the_job_it_waits_for(redis_url: str, connection: Redis) -> None:
    first = enqueue(connection)
    second = enqueue(connection, depends_on=first)
    assert status(second) == "deferred"
    run_burst(redis_url)
    assert status(first) == status(second) == "finished"
    assert events(connection, first.id)[-1].type == "done"


def test_a_dependent_that_comes_while_the_job_runs_is_not_forgotten(
    redis_url: str, connection: Redis
) -> None:
    first = enqueue(connection, max_completion_tokens=30)
    with running_worker(redis_url, step_seconds=0.01):
        wait_for(lambda: len(events(connection, first.id)) > 3)
        second = enqueue(connection, depends_on=first)
        wait_for(lambda: is_over(second))
    assert status(second) == "finished"


def test_a_dependent_may_follow_a_failure(redis_url: str, connection: Redis) -> None:
    first = enqueue(connection, n="two")
    second = enqueue(connection, depends_on=Dependency([first], allow_failure=True))
    run_burst(redis_url)
    assert status(first) == "failed"
    assert status(second) == "finished"


def test_a_dependent_whose_worker_died_before_it_was_enqueued_still_runs(
    redis_url: str, connection: Redis
) -> None:
    first = enqueue(connection)
    second = enqueue(connection, depends_on=first)
    with connection.pipeline() as pipeline:
        queue(connection).ready_job_registry.register_jobs([second], pipeline)
        pipeline.execute()
    assert status(second) == "ready_to_enqueue"
    queue(connection).remove(first)
    with running_worker(redis_url):
        wait_for(lambda: is_over(second))
    assert status(second) == "finished"


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


def test_a_stopped_job_is_not_retried_and_its_dependents_stay(
    redis_url: str, connection: Redis
) -> None:
    job = enqueue(connection, max_completion_tokens=5000, retry=Retry(max=2))
    dependent = enqueue(connection, depends_on=Dependency([job], allow_failure=True))
    with running_worker(redis_url, step_seconds=0.01):
        wait_for(lambda: len(events(connection, job.id)) > 3)
        send_stop_job_command(connection, job.id, serializer=JSONSerializer)
        wait_for(lambda: is_over(job))
    assert (status(job), status(dependent)) == ("stopped", "deferred")


def test_a_dependent_that_waits_for_two_jobs_leaves_nothing_for_ever(
    redis_url: str, connection: Redis
) -> None:
    first, second = enqueue(connection), enqueue(connection, n="two")
    third = enqueue(connection, depends_on=Dependency([first, second]))
    run_burst(redis_url)
    assert (status(first), status(second), status(third)) == ("finished", "failed", "deferred")
    for job in (first, second):
        assert connection.ttl(job.dependents_key) > 0


def test_a_dependent_of_another_queue_is_enqueued_there(redis_url: str, connection: Redis) -> None:
    first = enqueue(connection)
    other = Queue("mail", connection=connection, serializer=JSONSerializer)
    dependent = other.enqueue("os.getpid", depends_on=first)
    run_burst(redis_url)
    assert other.job_ids == [dependent.id]
    assert status(dependent) == "queued"
    assert other.deferred_job_registry.count == 0


def test_a_cancelled_dependent_does_not_run(redis_url: str, connection: Redis) -> None:
    first = enqueue(connection)
    dependent = enqueue(connection, depends_on=first)
    assert Producer(connection).cancel(dependent.id) == "cancelled"
    run_burst(redis_url)
    assert (status(first), status(dependent)) == ("finished", "canceled")


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
    ],
)
def test_a_job_with_what_no_worker_serves_fails_with_a_sentence_and_runs_nothing(
    redis_url: str,
    connection: Redis,
    field: str,
    options: dict[str, Any],
) -> None:
    job = enqueue(connection, retry=Retry(max=2), **options)
    assert run_burst(redis_url, name="mac-1").most_rows == 0
    assert status(job) == "failed"
    said = job.latest_result().exc_string
    assert said.startswith(f"{field}: ")
    assert "examples/after_each_job.py" in said
    assert not connection.exists("called")


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
