"""Cancels a job that waits, and stops one that runs."""

from __future__ import annotations

import time
from typing import Literal

import redis
from redis.exceptions import WatchError
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job
from rq.rate_limit import RateLimitRegistry
from rq.results import Result
from rq.serializers import JSONSerializer

from omlx_producer.client.outcome import fetch_job, read_stream_end, write_stream_end
from omlx_producer.errors import OmlxQueueError, UnknownJob
from omlx_producer.lua import load
from omlx_producer.wire import End, EndEvent, events_key
from omlx_producer.wire.end import ENDED
from omlx_producer.wire.keys import STOP_FIELD

CancelOutcome = Literal["cancelled", "stopping", "over"]

TRIES, PAUSE_SECONDS = 100, 0.02
REASON = "the job was cancelled before a worker took it"


def cancel_job(connection: redis.Redis, job_id: str, *, keep_for: int) -> CancelOutcome:
    """Cancel a job.

    Args:
        keep_for: seconds until a cancelled job expires.

    Returns:
        ``cancelled``: the job waited and will never run, or was cancelled before. ``stopping``: the
        job runs and its worker was told to stop it. If that worker has died, the next one ends the
        job. ``over``: the job had already finished or failed.

    Raises:
        UnknownJob: if the job does not exist.
        OmlxQueueError: if its state changed at every try.
    """
    for count in range(TRIES):
        try:
            job = fetch_job(connection, job_id)
        except UnknownJob:
            if count:
                return "over"
            raise
        status = job.get_status(refresh=False).value
        if status in ENDED:
            return "cancelled" if ENDED[status] == "cancelled" else "over"
        try:
            if status == "started":
                if not _mark(connection, job):
                    raise WatchError
                send_stop_job_command(connection, job_id, serializer=JSONSerializer)
                return "stopping"
            _cancel_waiting(connection, job, keep_for)
            return "cancelled"
        except (WatchError, InvalidJobOperation, NoSuchJobError):
            # A worker has claimed the job, given it back or ended it meanwhile: look again.
            time.sleep(PAUSE_SECONDS)
    raise OmlxQueueError(f"the state of job {job_id} keeps changing; cancel it again later")


def _mark(connection: redis.Redis, job: Job) -> bool:
    """Mark a running job as to be stopped; returns False if it no longer runs.

    A dead worker does not receive the command, but the next one reads the mark.
    """
    return bool(load(connection, "stop")(args=[job.id]))


def _cancel_waiting(connection: redis.Redis, job: Job, keep_for: int) -> None:
    """Cancel a job that no worker has, and end its stream.

    Raises:
        WatchError: if the job has changed meanwhile; nothing is written.
    """
    with connection.pipeline() as pipe:
        pipe.watch(job.key, events_key(job.id))  # type: ignore[no-untyped-call]
        if job.get_status().value in ENDED or job.is_started:
            raise WatchError
        tokens, over = read_stream_end(connection, job.id)
        pipe.multi()
        if over:
            # The job was requeued; the stream is that of an earlier run.
            pipe.delete(events_key(job.id))
            tokens = 0
        event = EndEvent.of(job.id, tokens, End("cancelled", REASON))
        # RQ refuses to cancel a job with a rate limit in a pipeline; its limit follows below.
        limit, job.rate_limit_key = job.rate_limit_key, None
        job.cancel(pipeline=pipe)
        pipe.hdel(job.key, STOP_FIELD)
        Result.create(job, Result.Type.STOPPED, keep_for, exc_string=REASON, pipeline=pipe)
        write_stream_end(pipe, event, keep_for=keep_for)
        pipe.expire(job.key, keep_for)
        pipe.expire(job.dependencies_key, keep_for)
        pipe.execute()
    if limit is not None:
        RateLimitRegistry(limit, connection).cancel(job.id)
