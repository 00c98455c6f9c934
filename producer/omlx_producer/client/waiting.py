"""The jobs that wait for a model."""

from __future__ import annotations

from dataclasses import dataclass

import redis
from redis.utils import str_if_bytes
from rq import Queue
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.utils import str_to_date

from omlx_producer.wire import PRIORITIES, Priority, queue_name, read_queue_name


@dataclass(frozen=True, slots=True)
class Waiting:
    """The queues of a model at one moment.

    Attributes:
        counts: jobs by priority.
        oldest_seconds: the age of the oldest job that is first in a queue; None if there is none.
    """

    counts: dict[str, int]
    oldest_seconds: float | None


def queue_key(model: str, priority: Priority) -> str:
    """The key of a queue's list of ids."""
    return Queue.redis_queue_namespace_prefix + queue_name(model, priority)


def queued_models(connection: redis.Redis) -> set[str]:
    """The models that have a queue, also an empty one, announced or not."""
    keys = map(str_if_bytes, connection.smembers(Queue.redis_queues_keys))
    names = (key.removeprefix(Queue.redis_queue_namespace_prefix) for key in keys)
    return {found[0] for found in map(read_queue_name, names) if found is not None}


def read_started(connection: redis.Redis, model: str) -> list[bytes]:
    """The jobs of a model that workers hold; each entry begins with a job's id."""
    with connection.pipeline(transaction=False) as pipe:
        for priority in PRIORITIES:
            queue = queue_name(model, priority)
            pipe.zrange(StartedJobRegistry(queue, connection=connection).key, 0, -1)
        return [entry for entries in pipe.execute() for entry in entries]


def read_waiting(connection: redis.Redis, model: str, now: float) -> Waiting:
    """The jobs that wait for a model.

    Args:
        now: seconds since 1970.
    """
    keys = [queue_key(model, priority) for priority in PRIORITIES]
    with connection.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.llen(key)
        for key in keys:
            pipe.lindex(key, 0)
        answers = pipe.execute()
        counts, heads = answers[: len(keys)], answers[len(keys) :]
        for job_id in filter(None, heads):
            pipe.hget(Job.key_for(str_if_bytes(job_id)), "enqueued_at")
        times = [date_seconds(date) for date in pipe.execute()]
    ages = [max(0.0, now - at) for at in times if at is not None]
    return Waiting(dict(zip(PRIORITIES, counts, strict=True)), max(ages, default=None))


def date_seconds(date: bytes | None) -> float | None:
    """RQ's form of a date as seconds since 1970; None if the job has gone or the date is broken."""
    try:
        return str_to_date(date or b"").timestamp()
    except ValueError:
        return None
