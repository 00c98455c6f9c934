"""Puts jobs into their queues: each exactly once, many in one transaction.

A job with an idempotency key has an id made from the key. A second submission finds the first one's
job as long as that exists: while it waits or runs, and until its result expires or is deleted.
Nothing else is stored.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import redis
from redis.client import Pipeline
from redis.exceptions import WatchError
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import utcformat

from omlx_producer.client.outcome import results_key
from omlx_producer.connection import server_time
from omlx_producer.errors import InvalidRequest
from omlx_producer.terminal import counted
from omlx_producer.wire import (
    EXPIRING_KEY,
    JOB_FUNCTION,
    WIRE_FIELD,
    GenerationRequest,
    Priority,
    events_key,
    queue_name,
    wake_channel,
)

# A MULTI of this many jobs delays other clients by about 3 ms; one of 50,000 by 200 ms.
CHUNK = 500
JOB_SECONDS = 3600
RESULT_SECONDS = 24 * 3600
FAILURE_SECONDS = 7 * 24 * 3600
DESCRIPTION_CHARACTERS = 40
LONGEST_KEY = 255


@dataclass(frozen=True, slots=True)
class JobTimes:
    """Seconds that a job may run, and that its result or failure is kept; -1 is for ever.

    Raises:
        InvalidRequest: if one is neither a whole number from 1 on nor -1 where that is possible.
    """

    job_timeout: int = JOB_SECONDS
    result_ttl: int = RESULT_SECONDS
    failure_ttl: int = FAILURE_SECONDS

    def __post_init__(self) -> None:
        for name in ("job_timeout", "result_ttl", "failure_ttl"):
            seconds, or_never = getattr(self, name), "" if name == "job_timeout" else ", or -1"
            if type(seconds) is not int or not (seconds >= 1 or (or_never and seconds == -1)):
                raise InvalidRequest(
                    name, f"got {seconds!r}", f"give whole seconds from 1 on{or_never}"
                )


@dataclass(frozen=True, slots=True)
class NewJob:
    """A checked request to be enqueued.

    Attributes:
        once: its id stands for an idempotency key. An existing job with this id is the job.
    """

    id: str
    request: GenerationRequest
    priority: Priority
    once: bool = False

    @classmethod
    def of(
        cls, request: GenerationRequest, priority: Priority, key: str | None, idempotent: bool
    ) -> NewJob:
        """A job with an id that follows from its key, from its request, or from nothing.

        Raises:
            InvalidRequest: if the key is empty or too long.
        """
        if key is not None:
            return cls(job_id_of(key), request, priority, once=True)
        if idempotent:
            return cls(job_id_of_content(request), request, priority, once=True)
        return cls(uuid.uuid4().hex, request, priority)

    @property
    def queue(self) -> str:
        return queue_name(self.request.model, self.priority)

    @property
    def key(self) -> str:
        return str(Job.key_for(self.id))


def job_id_of(key: str) -> str:
    """The id of the job with an idempotency key.

    Raises:
        InvalidRequest: if the key is empty, too long or not UTF-8.
    """
    if not isinstance(key, str):
        raise InvalidRequest("idempotency_key", f"got {key!r}", "give a text")
    if not 1 <= len(key) <= LONGEST_KEY:
        raise InvalidRequest(
            "idempotency_key", f"got {len(key)} characters", f"give 1 to {LONGEST_KEY}"
        )
    try:
        return f"once-{_digest(key)}"
    except UnicodeEncodeError:
        raise InvalidRequest(
            "idempotency_key",
            f"got {key!r:.60}",
            "give text without lone surrogates, which are no characters",
        ) from None


def job_id_of_content(request: GenerationRequest) -> str:
    """The id of all jobs with the same request, in whatever order its fields are."""
    document = json.dumps(_content(request.to_wire()), sort_keys=True, separators=(",", ":"))
    return f"same-{_digest(document)}"


def _content(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a request asks for; ``stream`` only says how its tokens come."""
    return {name: value for name, value in request.items() if name != "stream"}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def enqueue(
    connection: redis.Redis,
    jobs: Sequence[NewJob],
    times: JobTimes,
    open_queue: Callable[[str], Queue],
) -> None:
    """Enqueue jobs and wake their workers.

    redis-py repeats a command whose answer was lost, which would enqueue the jobs twice. A watched
    pipeline raises WatchError instead, also when another client enqueues a job with the same key.
    The jobs that exist then show what happened.

    Raises:
        InvalidRequest: if a job with the same key has another request; nothing was enqueued.
    """
    jobs = _unique(jobs)
    once = [job for job in jobs if job.once]
    # One job with a random id stands for all of them.
    fresh = [job for job in jobs if not job.once][:1]
    tried = False
    while True:
        with connection.pipeline() as pipe:
            pipe.watch(*(job.key for job in (*once, *fresh)))  # type: ignore[no-untyped-call]
            if tried and fresh and pipe.exists(fresh[0].key):
                return
            known = _find_known(connection, once)
            new = [job for job in jobs if job.id not in known]
            if not new:
                return
            has_window = any(job.request.completion_window for job in new)
            now = server_time(connection) if has_window else 0.0
            pipe.multi()
            _fill(pipe, new, times, open_queue, now)
            try:
                pipe.execute()
            except WatchError:
                tried = True
                continue
            return


def require_free_keys(connection: redis.Redis, jobs: Sequence[NewJob]) -> None:
    """Refuse jobs if one has the key of another job, but another request.

    Raises:
        InvalidRequest: for the first of them.
    """
    once = [job for job in _unique(jobs) if job.once]
    for start in range(0, len(once), CHUNK):
        _find_known(connection, once[start : start + CHUNK])


def _unique(jobs: Sequence[NewJob]) -> list[NewJob]:
    """The first job of each id.

    Raises:
        InvalidRequest: if a later one has another request.
    """
    by_id = {job.id: job for job in reversed(jobs)}
    for job in jobs:
        first = by_id[job.id]
        if job is not first and not _is_request_of(first.request.to_wire(), job):
            raise _taken(job.id)
    return [by_id[job_id] for job_id in dict.fromkeys(job.id for job in jobs)]


def _find_known(connection: redis.Redis, once: Sequence[NewJob]) -> set[str]:
    """The ids of the jobs that exist.

    Raises:
        InvalidRequest: if one of them has another request.
    """
    if not (once and connection.exists(*(job.key for job in once))):
        return set()
    with connection.pipeline(transaction=False) as pipe:
        for job in once:
            pipe.hget(job.key, "data")
        payloads = pipe.execute()
    known = set()
    for job, payload in zip(once, payloads, strict=True):
        if payload is None:
            continue
        stored = Job(job.id, connection=connection, serializer=JSONSerializer)
        stored.restore({b"data": payload})
        if not _is_request_of(stored.kwargs.get("request"), job):
            raise _taken(job.id)
        known.add(job.id)
    return known


def _is_request_of(wire: Any, job: NewJob) -> bool:
    """Whether a request in its JSON form asks for the same as a job's."""
    return isinstance(wire, dict) and _content(wire) == _content(job.request.to_wire())


def _taken(job_id: str) -> InvalidRequest:
    return InvalidRequest(
        "idempotency_key",
        f"job {job_id} has the same key and another request",
        "give each request its own key",
    )


def _fill(
    pipe: Pipeline,
    jobs: Sequence[NewJob],
    times: JobTimes,
    open_queue: Callable[[str], Queue],
    now: float,
) -> None:
    by_queue: dict[str, list[NewJob]] = {}
    for job in jobs:
        by_queue.setdefault(job.queue, []).append(job)
    for name, members in by_queue.items():
        data = [
            Queue.prepare_data(
                JOB_FUNCTION,
                kwargs={"request": job.request.to_wire()},
                job_id=job.id,
                description=_describe(job.request),
                timeout=times.job_timeout,
                result_ttl=times.result_ttl,
                failure_ttl=times.failure_ttl,
            )
            for job in members
        ]
        # What a deleted job with the same id left behind would be taken for this job's.
        once = [job.id for job in members if job.once]
        if left := [key for job_id in once for key in (events_key(job_id), results_key(job_id))]:
            pipe.delete(*left)
        open_queue(name).enqueue_many(data, pipeline=pipe)
        for job in members:
            pipe.hset(job.key, WIRE_FIELD, str(job.request.wire_version))
            if (window := job.request.window_seconds) is not None:
                # RQ writes the time of this machine, whose clock may be wrong.
                pipe.hset(job.key, "created_at", utcformat(datetime.fromtimestamp(now, UTC)))
                pipe.zadd(EXPIRING_KEY, {job.id: now + window})
        pipe.publish(wake_channel(members[0].request.model), len(members))


def _describe(request: GenerationRequest) -> str:
    """A line for dashboards. RQ's default would hold the whole request a second time."""
    first = request.texts[0] if request.texts else (request.messages or [])[-1].text
    text = first if isinstance(first, str) else counted(len(first), "token")
    return f"{request.model}: {' '.join(text[:DESCRIPTION_CHARACTERS].split())}"
