"""The stream of a running job that RQ's cancel takes from its worker: it has no end yet."""

from __future__ import annotations

from redis import Redis
from redis.client import Pipeline
from rq.job import Job

from omlx_producer.client.outcome import read_stream_end, write_stream_end
from omlx_producer.wire import EndEvent, events_key
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.ending import CANCELLED_WHILE_IT_RAN

CANCELED = b"canceled"
"""RQ's status of a cancelled job."""


def clear_up(connection: Redis, job: Claim, keep_for: int) -> None:
    """End the stream of a job that was cancelled while it ran.

    Args:
        keep_for: seconds until the stream expires.
    """
    # Without a transaction first: one that watches a stream in use is repeated again and again.
    if connection.hget(Job.key_for(job.id), "status") == CANCELED:
        _end_stream(connection, job.id, keep_for)


def _end_stream(connection: Redis, job_id: str, keep_for: int) -> None:
    """Write the terminal event of a cancelled job, if it has none.

    `omlx_producer.client.cancel` writes one for a job that was back in its queue meanwhile.
    """

    def write(pipeline: Pipeline) -> None:
        tokens, over = read_stream_end(pipeline, job_id)
        status = pipeline.hget(job_key, "status")
        pipeline.multi()
        if status == CANCELED and not over:
            event = EndEvent.of(job_id, tokens, CANCELLED_WHILE_IT_RAN)
            write_stream_end(pipeline, event, keep_for=keep_for)

    job_key = Job.key_for(job_id)
    connection.transaction(write, job_key, events_key(job_id))
