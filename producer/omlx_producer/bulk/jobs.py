"""The jobs of a run in Redis: their ids, their ends, and their deletion."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import redis
from redis.client import Pipeline
from redis.utils import str_if_bytes
from rq import Queue
from rq.job import Job
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry

from omlx_producer.bulk.row import BadRow, Row
from omlx_producer.errors import MalformedResult, UnknownJob
from omlx_producer.outage import broken
from omlx_producer.outcome import ENDINGS, Ending, Outcome, ask_result, read_outcome, results_key
from omlx_producer.protocol import bulk_job_id, ended_stream, events_key

log = logging.getLogger(__name__)

# Results read in one pipeline: a response may hold many log-probabilities.
FETCH = 50
ENTRIES = 200

_REGISTRIES = (FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)

# Only waiting jobs: claim.lua marks a job as started in the call that takes it from its queue.
_WITHDRAW = """
local withdrawn = {}
for _, job in ipairs(ARGV) do
  local status = redis.call('HGET', KEYS[2] .. job, 'status')
  if not status or status == 'queued' then
    redis.call('LREM', KEYS[1], 0, job)
    redis.call('DEL', KEYS[2] .. job)
    withdrawn[#withdrawn + 1] = job
  end
end
return withdrawn
"""


def job_id_of(run: str, row: Row | BadRow) -> str:
    """The id of a row's job: always the same for the same row of the same run."""
    return bulk_job_id(run, row.digest)


def read_origins(connection: redis.Redis, job_ids: Sequence[str]) -> dict[str, list[str]]:
    """The jobs that still exist, by their queue."""
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
    """RQ's status of each job; None for a job that does not exist."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(Job.key_for(job_id), "status")
        return [None if status is None else str_if_bytes(status) for status in pipe.execute()]


def read_endings(connection: redis.Redis, job_ids: Sequence[str]) -> dict[str, Outcome | None]:
    """How jobs ended. Jobs that wait or run are left out.

    Returns:
        By id: the outcome, None if the job or its result is gone or broken.
    """
    endings: dict[str, Outcome | None] = {}
    for start in range(0, len(job_ids), FETCH):
        chunk = job_ids[start : start + FETCH]
        with connection.pipeline(transaction=False) as pipe:
            for job_id in chunk:
                ask_result(pipe, job_id)
            replies = pipe.execute(raise_on_error=False)
        for job_id, status, entries in zip(chunk, replies[::2], replies[1::2], strict=True):
            if status is None or broken(status, entries):
                endings[job_id] = None
            elif ending := ENDINGS.get(str_if_bytes(status)):
                endings[job_id] = _outcome(job_id, ending, entries)
    return endings


def _outcome(job_id: str, ending: Ending, entries: list[Any]) -> Outcome | None:
    try:
        return read_outcome(job_id, ending, entries[0] if entries else None)
    except (UnknownJob, MalformedResult):
        return None


def withdraw(connection: redis.Redis, queue: str, job_ids: Sequence[str]) -> list[str]:
    """Delete the waiting ones of some jobs.

    Returns:
        The ids of the deleted jobs, which will not run.
    """
    script = connection.register_script(_WITHDRAW)
    keys = [Queue.redis_queue_namespace_prefix + queue, Job.redis_job_namespace_prefix]
    withdrawn: list[str] = []
    for start in range(0, len(job_ids), FETCH):
        reply = script(keys=keys, args=list(job_ids[start : start + FETCH]))
        withdrawn += [str_if_bytes(job_id) for job_id in reply]
    return withdrawn


def delete_jobs(pipe: Pipeline, by_queue: Mapping[str, Iterable[str]]) -> None:
    """Queue the deletion of ended jobs, with everything that Redis holds about them."""
    for queue, ids in by_queue.items():
        job_ids = list(ids)
        keys = [Job.key_for(job_id) for job_id in job_ids]
        # A bulk job has dependents only if somebody made one by hand.
        others = [f"{key}:{kind}" for key in keys for kind in ("dependents", "dependencies")]
        pipe.unlink(
            *keys,
            *(results_key(job_id) for job_id in job_ids),
            *(events_key(job_id) for job_id in job_ids),
            *others,
        )
        for registry in _REGISTRIES:
            pipe.zrem(registry.key_template.format(queue), *job_ids)


class EndedStream:
    """The stream that says which jobs of a run have ended. Each entry is read once.

    Attributes:
        key: of the stream.
        entries: the ids of entries by job, to be deleted with the job. Some jobs may be those of
            earlier runs.
    """

    def __init__(self, connection: redis.Redis, run: str) -> None:
        self._prefix = bulk_job_id(run, "")
        self.key = str(ended_stream(self._prefix))
        self.entries: dict[str, list[str]] = {}
        self._connection = connection
        self._cursor = "0-0"

    def read(self, block: float | None) -> list[str]:
        """The jobs of new entries, each once.

        Args:
            block: seconds to wait for an entry; None does not wait.
        """
        reply: Any = self._connection.xread(
            {self.key: self._cursor},
            count=ENTRIES,
            block=None if block is None else max(1, int(1000 * block)),
        )
        jobs: dict[str, None] = {}
        for entry_id, fields in itertools.chain.from_iterable(found for _, found in reply):
            self._cursor = entry_id.decode()
            job_id = fields.get(b"job", b"").decode(errors="replace")
            if not job_id.startswith(self._prefix):
                log.warning(
                    "%s: entry %s names no job of this run; ignored", self.key, self._cursor
                )
                continue
            jobs[job_id] = None
            known = self.entries.setdefault(job_id, [])
            if self._cursor not in known:
                known.append(self._cursor)
        return list(jobs)

    def rewind(self) -> None:
        """Read from the beginning again; the server may have been replaced."""
        self._cursor = "0-0"

    def delete(self, pipe: Pipeline, job_ids: Iterable[str]) -> None:
        """Queue the deletion of all entries of some jobs."""
        if ids := [entry for job_id in job_ids for entry in self.entries.get(job_id, ())]:
            pipe.xdel(self.key, *ids)

    def drop_if_empty(self) -> None:
        """Delete the stream if it has no entries. Only when none of its jobs run."""
        if not self._connection.xlen(self.key):
            self._connection.delete(self.key)

    def forget(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self.entries.pop(job_id, None)
