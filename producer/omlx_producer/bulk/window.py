"""The rows of a run that are in Redis, and the limit on their number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from omlx_producer.bulk.row import Row
from omlx_producer.enqueue import NewJob
from omlx_producer.protocol import Priority

# Keeps four workers with 256 rows each busy while the client is away for as long as a row takes.
# At 2 KB a job it takes 2 MB of Redis, prompts and results aside.
DEFAULT_WINDOW = 1024
WINDOW_CHARACTERS = 64 * 2**20


@dataclass(slots=True)
class InFlight:
    """A row whose job is, or may be, in Redis.

    Attributes:
        enqueued: whether its job was in Redis; only then does its absence count as a loss.
        losses: how often Redis lost its job or its result.
        rerun: whether its job may be one of an earlier run, whose failure does not count.
    """

    job_id: str
    row: Row
    rerun: bool
    enqueued: bool = False
    losses: int = 0

    def as_job(self, priority: Priority) -> NewJob:
        """Its job. Enqueued once: another feeder may do so while this process sleeps."""
        row = self.row
        return NewJob(self.job_id, row.request, priority, once=True, beginning=row.beginning)


class Window:
    """At most ``limit`` rows and `WINDOW_CHARACTERS` of prompts. A longer prompt goes alone.

    Args:
        limit: None takes every row, as they are in Redis already.
        rerun: run rows again whose jobs failed in an earlier run.
    """

    def __init__(self, limit: int | None, *, rerun: bool) -> None:
        self._limit = limit
        self._rerun = rerun
        self._rows: dict[str, InFlight] = {}
        self._characters = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._rows

    def __getitem__(self, job_id: str) -> InFlight:
        return self._rows[job_id]

    def __iter__(self) -> Iterator[InFlight]:
        return iter(self._rows.values())

    def room(self, leaving: int) -> int:
        """How many rows may join while ``leaving`` rows wait for their results to be durable."""
        if self._limit is None:
            return 1
        if self._rows and self._characters >= WINDOW_CHARACTERS:
            return 0
        return max(0, self._limit - len(self._rows) - leaving)

    def join(self, job_id: str, row: Row) -> InFlight:
        self._characters += row.characters
        flight = self._rows[job_id] = InFlight(job_id, row, self._rerun)
        return flight

    def leave(self, job_id: str) -> None:
        self._characters -= self._rows.pop(job_id).row.characters
