"""A job that has ended and was requeued: its earlier end counts no longer."""

from __future__ import annotations

import pytest
import redis
from rq.defaults import RQ_KEY_PREFIX as RQ
from rq.job import Job
from rq.serializers import JSONSerializer

from omlx_producer import JobEvent, JobHandle, TokenStream
from omlx_producer import connection as connection_module
from omlx_producer.wire import events_key
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.waiting import later, queued


@pytest.fixture
def requeued(connection: redis.Redis, job: JobHandle, worker: FakeWorker) -> JobHandle:
    """A job that has failed after three tokens and waits again."""
    worker.step("old", tokens=3)
    worker.fail("out of memory")
    found = Job.fetch(job.id, connection=connection, serializer=JSONSerializer)
    connection.zadd(f"{RQ}:failed:{job.queue}", {job.id: 2**40})
    found.requeue()
    assert queued(connection) == [job.id]
    return job


def test_it_can_be_cancelled_and_ends_so(connection: redis.Redis, requeued: JobHandle) -> None:
    assert requeued.cancel() == "cancelled"
    assert queued(connection) == []
    assert requeued.state().status == "cancelled"
    assert [(event.type, event.n) for event in requeued.stream()] == [("cancelled", 0)]


def test_those_who_watch_it_wait_for_its_next_end(
    connection: redis.Redis, requeued: JobHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "LONGEST_BLOCK_SECONDS", 0.1)

    def run_again() -> None:
        # As a worker does that claims it.
        connection.delete(events_key(requeued.id))
        worker = FakeWorker(connection, requeued.id)
        worker.start()
        worker.step("new")
        worker.finish()

    thread = later(run_again, 0.5)
    events: list[JobEvent] = list(TokenStream(connection, requeued.id))
    thread.join()
    assert [(event.type, event.n) for event in events] == [("tokens", 1), ("done", 1)]
