"""What RQ's own handlers serve: dependents, callbacks, retries, repeats."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError
from rq import Callback, RateLimit, Repeat, Retry
from rq.command import send_stop_job_command
from rq.job import Dependency, Job
from rq.serializers import JSONSerializer

from omlx_producer import Producer
from omlx_producer.protocol import CancelledEvent
from omlx_worker.control.callbacks import ServedJob
from omlx_worker.control.rq_endings import end_through_rq
from omlx_worker.control.worker import GenerationWorker
from omlx_worker.queue.ending import Ending
from omlx_worker.settings import WorkerSettings
from tests.helpers.fake_engine import BREAKS_PREPARE, FakeEngine
from tests.helpers.leases import claim, failed, kill
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    events,
    is_over,
    queue,
    run_burst,
    running_worker,
    started,
    status,
    streamed_text,
    wait_for,
)


def remember(job: Any, connection: Redis, result: Any) -> None:
    connection.set("remembered", result["choices"][0]["text"])


def remember_failure(job: Any, connection: Redis, *error: Any) -> None:
    connection.set("remembered", str(error[1]))


def remember_stop(job: Any, connection: Redis) -> None:
    connection.set("remembered", "stopped")


def wait_for_the_word(job: Any, connection: Redis, result: Any) -> None:
    connection.set("waiting", 1)
    connection.blpop(["word"], timeout=4)


def refuse(job: Any, connection: Redis, result: Any) -> None:
    raise ValueError("not good enough")


def refuse_in_odd_words(job: Any, connection: Redis, result: Any) -> None:
    raise ValueError("not \ud800\ngood")


def named(function: Any) -> Callback:
    return Callback(f"tests.integration.worker.test_rq_endings.{function.__name__}")


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


def test_a_success_callback_gets_the_result(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, on_success=named(remember))
    run_burst(redis_url)
    assert status(job) == "finished"
    text = job.return_value()["choices"][0]["text"]
    assert connection.get("remembered").decode() == text == streamed_text(connection, job.id)
    assert [event.type for event in events(connection, job.id)].count("done") == 1


def test_handlers_that_meet_a_busy_redis_are_called_again(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh, troubles = Job.refresh, [ResponseError("BUSY Redis is busy running a script.")]

    def refreshed(job: Job) -> None:
        if troubles:
            raise troubles.pop()
        refresh(job)

    monkeypatch.setattr("omlx_worker.control.callbacks.ServedJob.refresh", refreshed)
    job = enqueue(connection, on_success=named(remember))
    with running_worker(redis_url):
        wait_for(lambda: is_over(job))
    assert troubles == []
    assert status(job) == "finished"
    assert connection.get("remembered") is not None


def test_rqs_handlers_end_nothing_after_another_worker_has_taken_the_job(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_result_ttl = Job.get_result_ttl

    def taken(job: Job, default: int) -> int:
        connection.delete(queue(connection).started_job_registry.key)
        return get_result_ttl(job, default)

    monkeypatch.setattr("omlx_worker.control.callbacks.ServedJob.get_result_ttl", taken)
    job = enqueue(connection, on_success=named(remember))
    run_burst(redis_url)
    assert status(job) == "started"
    assert job.results() == []


def test_a_success_callback_that_raises_fails_the_job(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, on_success=named(refuse))
    run_burst(redis_url)
    assert status(job) == "failed"
    assert "not good enough" in job.latest_result().exc_string
    assert events(connection, job.id)[-1].type == "failed"
    assert started(connection) == 0


def test_what_a_callback_raises_is_told_in_one_line_of_text(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    # pytest-xdist cannot send a report whose log has the traceback of such an error.
    caplog.set_level("CRITICAL", logger="omlx_worker.control.rq_endings")
    job = enqueue(connection, on_success=named(refuse_in_odd_words))
    run_burst(redis_url)
    assert status(job) == "failed"
    sentence = "the success callback failed: ValueError: not \\ud800 good"
    assert events(connection, job.id)[-1].error == sentence


def test_a_failure_callback_gets_the_sentence(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, n="two", on_failure=named(remember_failure))
    run_burst(redis_url)
    assert status(job) == "failed"
    assert connection.get("remembered").startswith(b"n: got 'two'")


def test_a_stopped_callback_runs(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, max_completion_tokens=5000, on_stopped=named(remember_stop))
    with running_worker(redis_url, step_seconds=0.01):
        wait_for(lambda: len(events(connection, job.id)) > 3)
        send_stop_job_command(connection, job.id, serializer=JSONSerializer)
        wait_for(lambda: is_over(job))
        wait_for(lambda: events(connection, job.id)[-1].type == "cancelled")
    assert status(job) == "stopped"
    assert connection.get("remembered") == b"stopped"


def test_a_job_is_retried_as_often_as_it_says(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, BREAKS_PREPARE, retry=Retry(max=2))
    run_burst(redis_url)
    job.refresh()
    assert status(job) == "failed"
    assert job.retries_left == 0
    assert [event.type for event in events(connection, job.id)] == ["failed"]


def test_a_job_whose_lease_ends_while_it_is_stopped_is_retried_after_a_later_failure(
    connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WorkerSettings(model_alias=ALIAS)
    worker = GenerationWorker(settings, FakeEngine, connection=connection)
    leases = worker._leases
    job = enqueue(connection, retry=Retry(max=1))
    (claimed,) = claim(leases)
    monkeypatch.setattr(ServedJob, "call", lambda *_: kill(connection, leases))
    stopped = Ending("stopped", CancelledEvent(job_id=job.id, n=0, error="stop"))
    assert end_through_rq(worker, leases, claimed, stopped, ()) is None
    monkeypatch.undo()
    (claimed,) = claim(leases)
    end_through_rq(worker, leases, claimed, failed(job.id), ())
    assert status(job) == "queued"


def test_an_invalid_job_is_not_retried(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, n="two", retry=Retry(max=2))
    run_burst(redis_url)
    assert status(job) == "failed"
    assert len(job.results()) == 1


def test_a_repeated_job_runs_and_streams_each_time(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, repeat=Repeat(times=2), max_completion_tokens=5)
    run_burst(redis_url)
    assert status(job) == "finished"
    assert len(job.results()) == 3
    assert [event.type for event in events(connection, job.id)].count("done") == 1


@pytest.mark.parametrize("callback", [None, named(wait_for_the_word)])
def test_a_job_cancelled_before_it_is_ended_ends_its_stream_and_frees_its_slot(
    redis_url: str, connection: Redis, callback: Callback | None
) -> None:
    """Its own callback runs, or that of another job, whose turn is before."""
    limit = RateLimit("gpu", 1)
    with running_worker(redis_url, lease_seconds=600) as worker:
        if callback is None:
            enqueue(connection, on_success=named(wait_for_the_word))
            wait_for(lambda: connection.exists("waiting"))
        job = enqueue(connection, on_success=callback, rate_limit=limit)
        later = enqueue(connection, rate_limit=limit)
        wait_for(lambda: (claim := worker._leases.get(job.id)) and claim.ending)
        wait_for(lambda: connection.exists("waiting"))
        job.refresh()
        job.cancel()
        connection.rpush("word", "go")
        wait_for(lambda: is_over(later), 5)
    assert (status(job), status(later)) == ("canceled", "finished")
    assert events(connection, job.id)[-1].type == "cancelled"


def test_a_dependent_that_is_cancelled_while_its_job_ends_does_not_run(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = enqueue(connection)
    dependent = enqueue(connection, depends_on=first.id)
    fetch_many = Job.fetch_many

    def fetch_and_cancel(job_ids: Any, *args: Any, **kwargs: Any) -> Any:
        found = fetch_many(job_ids, *args, **kwargs)
        if dependent.id in job_ids and Producer(connection).cancel(dependent.id) == "cancelled":
            monkeypatch.undo()
        return found

    monkeypatch.setattr(Job, "fetch_many", fetch_and_cancel)
    run_burst(redis_url)
    assert (status(first), status(dependent)) == ("finished", "canceled")


def test_a_job_that_rq_ends_is_not_logged_with_its_prompt(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    job = enqueue(connection, prompt="a secret", on_success=named(remember))
    assert "a secret" in str(job.description)
    run_burst(redis_url, log_level="info")
    assert f"Successfully completed job {job.id}" in caplog.text
    assert "secret" not in caplog.text
