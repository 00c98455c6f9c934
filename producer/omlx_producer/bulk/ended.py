"""The stream on which a run hears which of its jobs have ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import redis
from redis.client import Pipeline

from omlx_producer.bulk.jobs import job_ids_end_on

COUNT = 200


class EndedStream:
    """Reads each entry once, and keeps what must be deleted with its job.

    Attributes:
        key: of the stream.
        entries: ids of entries by job; some are of jobs that earlier runs have left.
    """

    def __init__(self, connection: redis.Redis, run: str) -> None:
        self.key = job_ids_end_on(run)
        self.entries: dict[str, list[str]] = {}
        self._connection = connection
        self._cursor = "0-0"

    def read(self, block: float | None) -> list[str]:
        """The jobs of new entries, each once.

        Args:
            block: seconds to wait for one; None does not wait.
        """
        reply: Any = self._connection.xread(
            {self.key: self._cursor},
            count=COUNT,
            block=None if block is None else max(1, int(1000 * block)),
        )
        jobs: dict[str, None] = {}
        for entry_id, fields in itertools.chain.from_iterable(found for _, found in reply):
            self._cursor = entry_id.decode()
            job_id = fields[b"job"].decode()
            jobs[job_id] = None
            known = self.entries.setdefault(job_id, [])
            if self._cursor not in known:
                known.append(self._cursor)
        return list(jobs)

    def rewind(self) -> None:
        """Read from the beginning again: the server may have been replaced."""
        self._cursor = "0-0"

    def delete(self, pipe: Pipeline, job_ids: Iterable[str]) -> None:
        """Queue the deletion of all entries of some jobs."""
        if ids := [entry for job_id in job_ids for entry in self.entries.get(job_id, ())]:
            pipe.xdel(self.key, *ids)

    def drop_if_empty(self) -> None:
        """Delete the stream, which stays in Redis without entries. Only when nothing runs."""
        if not self._connection.xlen(self.key):
            self._connection.delete(self.key)

    def forget(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self.entries.pop(job_id, None)
