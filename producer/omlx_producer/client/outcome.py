"""What a job does and how it ended, from its RQ status, its result and its stream."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from numbers import Real
from typing import Any

import redis
from pydantic import ValidationError
from redis.client import Pipeline
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.results import Result
from rq.serializers import JSONSerializer

from omlx_producer.errors import (
    InvalidRequest,
    JobTimeout,
    MalformedResult,
    UnknownJob,
    shown,
)
from omlx_producer.wire import EndEvent, events_key, tokens_channel
from omlx_producer.wire.completion import Completion
from omlx_producer.wire.end import ENDED, STATES, End, Status
from omlx_producer.wire.request_part import MAX_LEVELS, levels

ResultEntry = tuple[bytes, Mapping[bytes, bytes]]

WAITING = (
    b"created",
    b"queued",
    b"deferred",
    b"ready_to_enqueue",
    b"rate_limited",
    b"scheduled",
)
"""RQ's statuses of jobs that wait."""
_DEEP = "nested too deeply"
EXPIRED = End(
    "expired", "the job did not finish within its completion_window", remedy="give it a longer one"
)


def unknown_job(job_id: str) -> UnknownJob:
    return UnknownJob(f"no job has the id {job_id!r}: check the id, or its result has expired")


def require_job_id(job_id: str) -> None:
    """Refuse an id that no job has: Redis's keys take UTF-8 only.

    Raises:
        UnknownJob: if it is no text, or holds a lone surrogate.
    """
    try:
        job_id.encode()
    except (AttributeError, UnicodeEncodeError):
        raise unknown_job(job_id) from None


def require_timeout(timeout: float | None) -> None:
    """Refuse a time to wait that is none.

    Raises:
        InvalidRequest: if it is no number, or NaN.
    """
    if not isinstance(timeout, Real | None) or timeout != timeout:  # NaN is a number.
        raise InvalidRequest("timeout", f"got {shown(timeout)}", "give seconds, or None")


def timed_out(job_id: str, timeout: float | None) -> JobTimeout:
    return JobTimeout(f"job {job_id} did not finish within {timeout:g} s")


def answer_of(job_id: str, end: End) -> Completion:
    """The result of a job that has ended.

    Raises:
        JobFailed: if the job failed.
        JobCancelled: if it was cancelled or stopped.
        MalformedResult: if its result is not a response body.
    """
    if not end.ok:
        raise end.error(job_id)
    try:
        return Completion(end.body)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        reason = f"{field}: {problem['msg']}" if field else "not a JSON object"
        raise _malformed(job_id, reason) from None


def event_of(job_id: str, end: End, cursor: int) -> EndEvent:
    """The last event of a stream that has none.

    Args:
        cursor: the number of tokens that the consumer has had.

    Raises:
        MalformedResult: if the job finished, but its result is not a response body.
    """
    if not end.ok:
        return EndEvent.of(job_id, cursor, end)
    completion = answer_of(job_id, end)
    n = max(cursor, completion.usage.completion_tokens)
    return completion.end_event(job_id, n, head=completion.head)


def _malformed(job_id: str, reason: str) -> MalformedResult:
    return MalformedResult(
        job_id,
        f"the result of job {job_id} is not that of a generation job ({reason}); "
        "check the id, or submit the request again",
    )


def results_key(job_id: str) -> str:
    """The stream that holds RQ's results of a job."""
    return str(Result.get_key(job_id))  # type: ignore[no-untyped-call]


def ask_result(pipe: Any, job_id: str) -> Any:
    """Queue the reading of a job's status and last result.

    Args:
        pipe: a sync or async pipeline of redis-py.

    Returns:
        The pipeline. Executed, it gives the status or None, and a list of at most one entry.
    """
    pipe.hget(Job.key_for(job_id), "status")
    pipe.xrevrange(results_key(job_id), count=1)
    return pipe


def read_end(job_id: str, status: str, entry: ResultEntry | None) -> End:
    """Read the last entry of the results stream of an ended job.

    It has JSON in base64, or the zlib form of the reason in base64.

    Args:
        status: RQ's, one of `ENDED`.

    Raises:
        UnknownJob: if the job finished, but its result has expired.
        MalformedResult: if the entry is not one of RQ's, or not in JSON. Pickle is never read.
    """
    usual = End(ENDED[status], STATES[ENDED[status]].said)
    if entry is None:
        if usual.ok:
            raise unknown_job(job_id)
        return usual
    _, payload = entry
    if b"type" not in payload:
        raise _malformed(job_id, "not written by RQ")
    body, error = None, ""
    try:
        if text := payload.get(b"return_value"):
            text = b64decode(text)
            body = json.loads(text)
            # Every level has a bracket of its own.
            if text.count(b"[") + text.count(b"{") > MAX_LEVELS and levels(body) > MAX_LEVELS:
                raise RecursionError
        if reason := payload.get(b"exc_string"):
            error = zlib.decompress(b64decode(reason)).decode()
    except ValueError:
        raise _malformed(job_id, "not JSON") from None
    except RecursionError:
        raise _malformed(job_id, _DEEP) from None
    except zlib.error:
        raise _malformed(job_id, "not written by RQ") from None
    if usual.ok:
        return replace(usual, body=body)
    lines = error.strip().splitlines() or [usual.sentence]
    names = (b"code", b"field", b"remedy")
    code, field, remedy = (payload.get(name, b"").decode(errors="replace") for name in names)
    return End.read(usual.code, code, lines[-1], field, remedy)


def find_end(job_id: str, status: bytes | None, entries: Sequence[ResultEntry]) -> End | None:
    """The end of a job, from the reply to `ask_result`; None while it waits or runs.

    Raises:
        UnknownJob: if the job does not exist, or its result has expired.
        MalformedResult: see `read_end`.
    """
    if status is None:
        raise unknown_job(job_id)
    if (name := status.decode()) not in ENDED:
        return None
    return read_end(job_id, name, entries[0] if entries else None)


@dataclass(frozen=True, slots=True)
class JobState:
    """A job at one moment.

    Attributes:
        position: the number of jobs before it in its queue, while it is queued.
        tokens: the number of tokens it has published.
        worker: the name of its worker, or of its last one.
        error: why it failed or was cancelled.

    >>> job = producer.submit(model="asleep", prompt="x", require_known_model=False)
    >>> state = job.state()
    >>> state.status, state.position
    ('queued', 0)
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
    """RQ's record of a job.

    Raises:
        UnknownJob: if it does not exist.
    """
    require_job_id(job_id)
    try:
        return Job.fetch(job_id, connection=connection, serializer=JSONSerializer)
    except (NoSuchJobError, ValueError):
        # RQ raises a ValueError for ids that it cannot have made.
        raise unknown_job(job_id) from None


def read_state(connection: redis.Redis, job_id: str) -> JobState:
    """Look up a job.

    Raises:
        UnknownJob: if it does not exist.
    """
    job = fetch_job(connection, job_id)
    status = job.get_status(refresh=False).value
    position = error = None
    told: Status = "queued"
    if status in ENDED:
        told = STATES[ENDED[status]].status
    elif status == "started":
        told = "started"
    else:
        position = Queue(job.origin, connection=connection).get_job_position(job_id)
    if told in ("failed", "cancelled"):
        _, entries = ask_result(connection.pipeline(), job_id).execute()
        end = read_end(job_id, status, entries[0] if entries else None)
        told, error = end.state.status, str(end)
    tokens, _ = read_stream_end(connection, job_id)
    return JobState(
        id=job_id,
        status=told,
        queue=job.origin,
        position=position,
        tokens=tokens,
        worker=job.worker_name,
        enqueued_at=job.enqueued_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        error=error,
    )


def read_stream_end(connection: redis.Redis, job_id: str) -> tuple[int, bool]:
    """The number of tokens in a job's stream, and whether the stream has ended.

    The id of the last entry says both.
    """
    last: list[tuple[bytes, dict[bytes, bytes]]] = connection.xrevrange(  # type: ignore[assignment]
        events_key(job_id), count=1
    )
    if not last:
        return 0, False
    tokens, _, part = last[0][0].partition(b"-")
    return int(tokens), part != b"0"


def write_stream_end(pipeline: Pipeline, event: EndEvent, *, keep_for: int) -> None:
    """Queue the last event of a job, for its consumers.

    Args:
        keep_for: seconds until the stream expires.
    """
    key, payload = events_key(event.job_id), event.model_dump_json()
    pipeline.xadd(key, {"event": payload}, id=event.stream_id)
    pipeline.publish(tokens_channel(event.job_id), payload)
    pipeline.expire(key, keep_for)
