"""The jobs that wait for a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import redis
from redis.utils import str_if_bytes
from rq import Queue
from rq.registry import StartedJobRegistry
from rq.utils import str_to_date

from omlx_producer.wire import PRIORITIES, queue_name, read_queue_name


def queue_key(queue: str) -> str:
    """The key of a queue's list of ids."""
    return Queue.redis_queue_namespace_prefix + queue


def queued_models(connection: redis.Redis) -> set[str]:
    """The models that have a queue, also an empty one, announced or not."""
    return models_of(connection.smembers(Queue.redis_queues_keys))


def models_of(keys: Iterable[Any]) -> set[str]:
    """The models of keys of queues; those of others are left out."""
    prefix = Queue.redis_queue_namespace_prefix
    names = (str_if_bytes(key).removeprefix(prefix) for key in keys)
    return {found[0] for found in map(read_queue_name, names) if found is not None}


def read_started(connection: redis.Redis, model: str) -> list[bytes]:
    """The jobs of a model that workers hold; each entry begins with a job's id."""
    with connection.pipeline(transaction=False) as pipe:
        for priority in PRIORITIES:
            queue = queue_name(model, priority)
            pipe.zrange(StartedJobRegistry(queue, connection=connection).key, 0, -1)
        return [entry for entries in pipe.execute() for entry in entries]


def date_seconds(date: bytes | None) -> float | None:
    """RQ's form of a date as seconds since 1970; None if the job has gone or the date is broken."""
    try:
        return str_to_date(date or b"").timestamp()
    except ValueError:
        return None
