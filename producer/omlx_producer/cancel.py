"""Cancel a job, wherever it is."""

from __future__ import annotations

import time
from typing import Literal

import redis
from redis.exceptions import WatchError
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job
from rq.results import Result
from rq.serializers import JSONSerializer

from omlx_producer.errors import OmlxQueueError
from omlx_producer.outcome import ENDINGS
from omlx_producer.protocol import CancelledEvent, events_key
from omlx_producer.state import fetch_job
from omlx_producer.stream_end import read_stream_end, write_stream_end

CancelOutcome = Literal["cancelled", "stopping", "over"]

TRIES, PAUSE_SECONDS = 100, 0.02
# In RQ's job hash; workers honour it when they claim a job, write for it, or renew its lease.
STOP_FIELD = "omlx_stop"
REASON = "the job was cancelled before a worker took it"


def cancel_job(connection: redis.Redis, job_id: str, *, keep_for: int) -> CancelOutcome:
    """Cancel a job that waits, stop one that runs, leave one that is over as it is.

    Args:
        connection: a client of Redis.
        job_id: the job.
        keep_for: seconds for which a cancelled job can still be asked about.

    Returns:
        ``cancelled``: it waited and will never run. ``stopping``: it runs, and its worker was
        told to stop it; if that worker has just died, the next one ends the job instead of
        running it again. ``over``: it had finished, failed or been cancelled.

    Raises:
        UnknownJob: if there is none.
        OmlxQueueError: if it changed hands at every try.
    """
    for _ in range(TRIES):
        job = fetch_job(connection, job_id)
        status = job.get_status(refresh=False).value
        if status in ENDINGS:
            return "over"
        try:
            if status == "started":
                if not _mark(connection, job):
                    raise WatchError
                send_stop_job_command(connection, job_id, serializer=JSONSerializer)
                return "stopping"
            _cancel_waiting(connection, job, keep_for)
            return "cancelled"
        except (WatchError, InvalidJobOperation, NoSuchJobError):
            # A worker took the job, gave it back or ended it meanwhile: look again.
            time.sleep(PAUSE_SECONDS)
    raise OmlxQueueError(f"job {job_id} changes hands all the time; cancel it again later")


def _mark(connection: redis.Redis, job: Job) -> bool:
    """Note on a running job that it is to be stopped, for a command is heard by living workers
    only; returns False if it no longer runs."""
    script = """
        if redis.call('HGET', KEYS[1], 'status') ~= 'started' then return 0 end
        return redis.call('HSET', KEYS[1], ARGV[1], 1) and 1
    """
    return bool(connection.eval(script, 1, job.key, STOP_FIELD))


def _cancel_waiting(connection: redis.Redis, job: Job, keep_for: int) -> None:
    """Cancel a job that no worker has, and tell those who wait for its tokens or its result.

    Raises:
        WatchError: if the job changed meanwhile; nothing has been done then.
    """
    with connection.pipeline() as pipe:
        pipe.watch(job.key, events_key(job.id))  # type: ignore[no-untyped-call]
        if job.get_status().value in ENDINGS or job.is_started:
            raise WatchError
        tokens, over = read_stream_end(connection, job.id)
        pipe.multi()
        if over:
            # The job was requeued, and this is the end of an earlier run of it.
            pipe.delete(events_key(job.id))
            tokens = 0
        event = CancelledEvent(job_id=job.id, n=tokens, error=REASON)
        job.cancel(pipeline=pipe)
        pipe.hdel(job.key, STOP_FIELD)
        Result.create(job, Result.Type.STOPPED, keep_for, exc_string=REASON, pipeline=pipe)
        write_stream_end(pipe, event, keep_for=keep_for)
        pipe.expire(job.key, keep_for)
        pipe.expire(job.dependencies_key, keep_for)
        pipe.execute()
