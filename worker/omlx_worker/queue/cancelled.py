"""What a running job leaves behind when RQ's cancel or delete takes it from its worker.

Its stream has no end, and RQ keeps its rate limit until its execution is over.
"""

from __future__ import annotations

import logging

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ResponseError
from rq.executions import ExecutionRegistry
from rq.job import Job
from rq.rate_limit import RateLimitRegistry

from omlx_producer.outage import passes
from omlx_producer.outcome import read_stream_end, write_stream_end
from omlx_producer.protocol import CancelledEvent, events_key
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.ending import CANCELLED_WHILE_IT_RAN

log = logging.getLogger("omlx_worker.queue.cancelled")

CANCELED = b"canceled"
"""RQ's status of a cancelled job."""


def clear_up(connection: Redis, job: Claim, keep_for: int) -> None:
    """Free the slot and end the stream of a job whose lease is gone, if nobody else has it.

    Args:
        keep_for: seconds until the stream expires.
    """
    try:
        if job.needs_rq:
            _release_slot(connection, job)
        # Another worker may be writing to the stream, and a transaction would wait for a pause.
        if connection.hget(Job.key_for(job.id), "status") == CANCELED:
            _end_stream(connection, job.id, keep_for)
    except ResponseError as error:
        if passes(error):
            raise
        log.warning("cannot clear up after job %s: %s", job.id, error)


def _release_slot(connection: Redis, job: Claim) -> None:
    """Release the rate limit of a job, unless it is queued or runs elsewhere."""
    connection.zrem(ExecutionRegistry(job.id, connection).key, job.execution)
    # A deleted job no longer says which limit it had.
    for limit in RateLimitRegistry.all(connection):
        limit.release_stale_and_enqueue(job.id)


def _end_stream(connection: Redis, job_id: str, keep_for: int) -> None:
    """Write the terminal event of a cancelled job, if it has none.

    `omlx_producer.cancel` writes one for a job that was back in its queue meanwhile.
    """

    def write(pipeline: Pipeline) -> None:
        tokens, over = read_stream_end(pipeline, job_id)
        status = pipeline.hget(job_key, "status")
        pipeline.multi()
        if status == CANCELED and not over:
            event = CancelledEvent(job_id=job_id, n=tokens, error=CANCELLED_WHILE_IT_RAN)
            write_stream_end(pipeline, event, keep_for=keep_for)

    job_key = Job.key_for(job_id)
    connection.transaction(write, job_key, events_key(job_id))
