"""What a job is doing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import redis
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from omlx_producer.outcome import ENDINGS, ask_result, read_outcome, unknown_job
from omlx_producer.stream_end import read_stream_end

Status = Literal["queued", "started", "finished", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class JobState:
    """A job at one moment.

    Attributes:
        position: how many jobs of its queue come before it, while it is queued.
        tokens: how many tokens it has published so far.
        worker: the name of the worker that has it or had it last.
        error: why it failed or was cancelled.
    """

    id: str
    status: Status
    queue: str
    position: int | None
    tokens: int
    worker: str | None
    enqueued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    error: str | None


def fetch_job(connection: redis.Redis, job_id: str) -> Job:
    """RQ's own view of a job.

    Raises:
        UnknownJob: if there is none.
    """
    try:
        return Job.fetch(job_id, connection=connection, serializer=JSONSerializer)
    except (NoSuchJobError, ValueError):
        # RQ refuses ids that it could not have made with a ValueError.
        raise unknown_job(job_id) from None


def read_state(connection: redis.Redis, job_id: str) -> JobState:
    """Look a job up.

    Raises:
        UnknownJob: if there is none.
    """
    job = fetch_job(connection, job_id)
    status = job.get_status(refresh=False).value
    ending = ENDINGS.get(status)
    position = error = None
    if ending is None and status != "started":
        position = Queue(job.origin, connection=connection).get_job_position(job_id)
    elif ending == "failed" or ending == "cancelled":
        _, entries = ask_result(connection.pipeline(), job_id).execute()
        error = read_outcome(job_id, ending, entries[0] if entries else None).error
    tokens, _ = read_stream_end(connection, job_id)
    return JobState(
        id=job_id,
        status=ending or ("started" if status == "started" else "queued"),
        queue=job.origin,
        position=position,
        tokens=tokens,
        worker=job.worker_name,
        enqueued_at=job.enqueued_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        error=error,
    )
