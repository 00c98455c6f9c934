"""A job can be cancelled wherever it is, and all who wait for it learn so."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import redis
from rq.defaults import RQ_KEY_PREFIX as RQ
from rq.job import Job
from rq.registry import CanceledJobRegistry
from rq.serializers import JSONSerializer

from omlx_producer import (
    JobCancelled,
    JobHandle,
    OmlxQueueError,
)
from omlx_producer.client import cancel
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.waiting import later, queued


def test_a_waiting_job_is_cancelled_for_good(connection: redis.Redis, job: JobHandle) -> None:
    assert job.cancel() == "cancelled"
    assert queued(connection) == []
    assert job.state().status == "cancelled"
    canceled = CanceledJobRegistry(job.queue, connection=connection, serializer=JSONSerializer)
    assert canceled.get_job_ids() == [job.id]
    with pytest.raises(JobCancelled, match="before a worker took it"):
        job.result()
    (event,) = job.stream()
    assert event.type == "cancelled"
    for key in (f"{RQ}:job:{job.id}", f"{RQ}:results:{job.id}", f"omlx:events:{job.id}"):
        assert connection.ttl(key) > 0


def test_those_who_wait_learn_of_a_cancellation_at_once(job: JobHandle) -> None:
    thread = later(job.cancel)
    began = time.monotonic()
    events: list[Any] = []
    reader = later(lambda: events.extend(job.stream()), 0)
    with pytest.raises(JobCancelled):
        job.result()
    reader.join()
    thread.join()
    assert time.monotonic() - began < 1.5
    assert [event.type for event in events] == ["cancelled"]


def test_a_job_given_back_half_done_is_cancelled_after_its_tokens(
    connection: redis.Redis, job: JobHandle, worker: FakeWorker
) -> None:
    worker.step("a", tokens=2)
    connection.hset(f"{RQ}:job:{job.id}", "status", "queued")
    connection.lpush(f"{RQ}:queue:{job.queue}", job.id)
    assert job.cancel() == "cancelled"
    assert [(event.type, event.n) for event in job.stream()] == [("tokens", 2), ("cancelled", 2)]


def test_a_running_job_is_stopped_by_its_worker(
    connection: redis.Redis, job: JobHandle, worker: FakeWorker
) -> None:
    with connection.pubsub() as pubsub:
        pubsub.subscribe(f"{RQ}:pubsub:fake-worker")
        pubsub.get_message(timeout=1)
        assert job.cancel() == "stopping"
        command = json.loads(pubsub.get_message(timeout=1)["data"])
        assert command["command"] == "stop-job"
        assert command["job_id"] == job.id


@pytest.mark.usefixtures("worker")
def test_a_job_that_was_cancelled_is_cancelled_again(
    connection: redis.Redis, job: JobHandle
) -> None:
    connection.hset(f"{RQ}:job:{job.id}", "status", "stopped")
    assert job.cancel() == "cancelled"
    assert job.state().status == "cancelled"


def test_a_job_that_is_over_stays_as_it_is(job: JobHandle, worker: FakeWorker) -> None:
    body = worker.finish()
    assert job.cancel() == "over"
    assert job.result() == body


def test_a_job_taken_while_it_is_cancelled_is_stopped_instead(
    connection: redis.Redis, job: JobHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker takes it between the look at its status and the cancellation."""
    cancel = Job.cancel

    def taken_first(self: Job, *args: Any, **kwargs: Any) -> None:
        FakeWorker(connection, job.id).start()
        cancel(self, *args, **kwargs)

    monkeypatch.setattr(Job, "cancel", taken_first)
    assert job.cancel() == "stopping"
    assert job.state().status == "started"
    assert not connection.exists(f"omlx:events:{job.id}")


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_that_ends_and_expires_while_it_is_cancelled_is_over(
    connection: redis.Redis, job: JobHandle, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """It goes between the look at its status and the cancellation."""
    if begun:
        FakeWorker(connection, job.id).start()
    for method in ("evalsha", "pipeline"):
        call = getattr(connection, method)

        def gone_first(*args: Any, call: Any = call, **kwargs: Any) -> Any:
            connection.delete(f"{RQ}:job:{job.id}")
            return call(*args, **kwargs)

        monkeypatch.setattr(connection, method, gone_first)
    assert cancel.cancel_job(connection, job.id, keep_for=60) == "over"


def test_a_job_that_runs_nowhere_does_not_hang_its_canceller(
    connection: redis.Redis, job: JobHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel, "TRIES", 3)
    connection.hset(f"{RQ}:job:{job.id}", mapping={"status": "started", "worker_name": ""})
    with pytest.raises(OmlxQueueError, match="cancel it again later"):
        job.cancel()
