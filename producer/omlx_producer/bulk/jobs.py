"""The jobs of a run in Redis: their names, what became of them, and letting go of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import redis
from redis.client import Pipeline
from redis.utils import str_if_bytes
from rq.job import Job
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry

from omlx_producer.bulk.row import Row
from omlx_producer.errors import UnknownJob
from omlx_producer.outcome import ENDINGS, Ending, Outcome, ask_result, read_outcome, results_key
from omlx_producer.protocol import bulk_job_id, ended_stream, events_key

# Results asked for in one pipeline: a full response may have many log-probabilities.
FETCH = 50

_REGISTRIES = (FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)

# Only what still waits: claim.lua starts a job in the call that takes it from its queue.
_WITHDRAW = """
local withdrawn = {}
for _, job in ipairs(ARGV) do
  local status = redis.call('HGET', 'rq:job:' .. job, 'status')
  if not status or status == 'queued' then
    redis.call('LREM', KEYS[1], 0, job)
    redis.call('DEL', 'rq:job:' .. job)
    withdrawn[#withdrawn + 1] = job
  end
end
return withdrawn
"""


def job_id_of(run: str, row: Row) -> str:
    """The id of a row's job: the same row of the same run has the same one for ever."""
    return bulk_job_id(run, row.digest)


def job_ids_end_on(run: str) -> str:
    """The stream on which the ends of a run's jobs appear."""
    return str(ended_stream(bulk_job_id(run, "")))


def read_origins(connection: redis.Redis, job_ids: Sequence[str]) -> dict[str, list[str]]:
    """The jobs that are still there, by the queue that they came from."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(Job.key_for(job_id), "origin")
        origins = pipe.execute()
    by_queue: dict[str, list[str]] = {}
    for job_id, origin in zip(job_ids, origins, strict=True):
        if origin is not None:
            by_queue.setdefault(str_if_bytes(origin), []).append(job_id)
    return by_queue


def read_statuses(connection: redis.Redis, job_ids: Sequence[str]) -> list[str | None]:
    """RQ's status of each job; None where there is none."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(Job.key_for(job_id), "status")
        return [None if status is None else str_if_bytes(status) for status in pipe.execute()]


def read_endings(connection: redis.Redis, job_ids: Sequence[str]) -> dict[str, Outcome | None]:
    """How jobs ended; jobs that have not are left out.

    Returns:
        By id: the outcome, or None for a job that is gone, or has lost its result.
    """
    endings: dict[str, Outcome | None] = {}
    for start in range(0, len(job_ids), FETCH):
        chunk = job_ids[start : start + FETCH]
        with connection.pipeline(transaction=False) as pipe:
            for job_id in chunk:
                ask_result(pipe, job_id)
            replies = pipe.execute()
        for job_id, status, entries in zip(chunk, replies[::2], replies[1::2], strict=True):
            if status is None:
                endings[job_id] = None
            elif ending := ENDINGS.get(str_if_bytes(status)):
                endings[job_id] = _outcome(job_id, ending, entries)
    return endings


def _outcome(job_id: str, ending: Ending, entries: list[Any]) -> Outcome | None:
    try:
        return read_outcome(job_id, ending, entries[0] if entries else None)
    except UnknownJob:
        return None


def withdraw(connection: redis.Redis, queue: str, job_ids: Sequence[str]) -> list[str]:
    """Take jobs that wait out of their queue and delete them.

    Returns:
        The ids of those that will not run.
    """
    script = connection.register_script(_WITHDRAW)
    withdrawn: list[str] = []
    for start in range(0, len(job_ids), FETCH):
        reply = script(keys=[f"rq:queue:{queue}"], args=list(job_ids[start : start + FETCH]))
        withdrawn += [str_if_bytes(job_id) for job_id in reply]
    return withdrawn


def let_go(pipe: Pipeline, by_queue: Mapping[str, Iterable[str]]) -> None:
    """Queue the deletion of jobs that are over, with all that Redis holds about them."""
    for queue, ids in by_queue.items():
        job_ids = list(ids)
        keys = [Job.key_for(job_id) for job_id in job_ids]
        # RQ keeps dependents beside each job; a bulk job has none unless somebody made one.
        others = [f"{key}:{kind}" for key in keys for kind in ("dependents", "dependencies")]
        pipe.unlink(
            *keys,
            *(results_key(job_id) for job_id in job_ids),
            *(events_key(job_id) for job_id in job_ids),
            *others,
        )
        for registry in _REGISTRIES:
            pipe.zrem(registry.key_template.format(queue), *job_ids)
