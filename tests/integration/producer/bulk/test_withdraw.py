"""Waiting jobs of a run can be taken back."""

from __future__ import annotations

from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from omlx_producer.bulk.jobs import withdraw
from omlx_producer.protocol import JOB_FUNCTION


def test_only_waiting_jobs_are_withdrawn(connection: Redis) -> None:
    queue = Queue("omlx:demo:bulk", connection=connection, serializer=JSONSerializer)
    waiting, running = (queue.enqueue(JOB_FUNCTION) for _ in range(2))
    connection.hset(running.key, "status", "started")
    assert withdraw(connection, queue.name, [waiting.id, running.id]) == [waiting.id]
    assert queue.job_ids == [running.id]
    assert not connection.exists(waiting.key)
    assert connection.exists(running.key)
