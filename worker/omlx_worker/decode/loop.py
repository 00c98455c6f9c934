"""The rows of this worker between scheduler and engine: what is due is done, one act at a time.

Knows no threads, no mailboxes and no Redis. The decode thread calls `act` again and again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import PrefillPace
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth.driver import Pacing
from omlx_worker.decode.scheduler import (
    BULK,
    DEFAULT,
    HIGH,
    PATIENCE_SECONDS,
    Decode,
    Idle,
    Pause,
    Prefill,
    Resume,
    Scheduler,
)
from omlx_worker.engine.interface import Emission, Engine, Row
from omlx_worker.job import ActiveJob

log = logging.getLogger("omlx_worker.decode.loop")

CHANGE_STEPS = 2
"""A step that was traced is slow, and so may the next be, for which memory is allocated anew."""

LEVELS = {"high": HIGH, "default": DEFAULT, "bulk": BULK}


class EngineFailed(RuntimeError):
    """The engine raised.

    Attributes:
        jobs: those that it was running.
    """

    def __init__(self, jobs: list[ActiveJob], error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.jobs = jobs


@dataclass(slots=True)
class _Running:
    """A row in this worker, and the tokens it has produced here."""

    row: Row
    job: ActiveJob
    produced: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """What would be read again if its cache were lost."""
        return self.row.length + len(self.produced)

    def from_here(self) -> Row:
        """The row as one that goes on from the tokens it has."""
        return replace(self.row, generated=(*self.row.generated, *self.produced))


class Decoding:
    """Rows from their admission to their last token.

    Args:
        pacing: decides how deep steps draft; without it, as deep as rows may.
        pace: how many prompt tokens are read at a time.
        patience: see `Scheduler`.
    """

    def __init__(
        self,
        engine: Engine,
        budget: MemoryBudget,
        counters: Counters,
        *,
        pacing: Pacing | None,
        pace: PrefillPace,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.counters = counters
        self._engine = engine
        self._budget = budget
        self._pacing = pacing
        self._pace = pace
        self._scheduler = Scheduler(engine.max_rows, pace, patience=patience, fits=self._fits)
        self._rows: dict[str, _Running] = {}
        self._stepped_at: float | None = None

    def add(self, job: ActiveJob) -> None:
        level = LEVELS.get(job.claim.priority, DEFAULT)
        for row in job.rows:
            self._rows[row.row_id] = _Running(row, job)
            self._scheduler.add(row.row_id, row.length, HIGH if job.claim.urgent else level)

    def drop(self, job: ActiveJob) -> None:
        """Let go of the rows of a job that are left, before the next step."""
        for row in job.rows:
            if self._rows.pop(row.row_id, None) is None:
                continue
            if self._scheduler.has_joined(row.row_id):
                try:
                    self._engine.remove(row.row_id)
                except Exception:
                    log.exception("the engine failed to drop row %s", row.row_id)
            self._forget(row.row_id)
            self._disturb()

    def holds(self, job: ActiveJob) -> bool:
        """Whether any row of a job is left."""
        return any(row.row_id in self._rows for row in job.rows)

    def has_started(self, job: ActiveJob) -> bool:
        """Whether the engine has work in any row of a job."""
        return any(self._scheduler.has_joined(row.row_id) for row in job.rows)

    def act(self) -> list[Emission] | None:
        """Do what is due next.

        Returns:
            What was produced, or None when there is nothing to do.

        Raises:
            EngineFailed: the jobs that it names are to be dropped.
        """
        try:
            return self._act()
        finally:
            self.counters.batch = self._scheduler.joined
            self.counters.waiting = self._scheduler.waiting

    def _act(self) -> list[Emission] | None:
        match self._scheduler.next():
            case Prefill(row_id, tokens, joins):
                self._prefill(row_id, tokens, joins)
            case Pause(row_id):
                self._pause(row_id)
            case Resume(row_id):
                self._resume(row_id)
            case Decode():
                return self._step()
            case Idle():
                self._stepped_at = None
                return None
        return []

    def _prefill(self, row_id: str, tokens: int, joins: bool) -> None:
        running = self._rows[row_id]
        began = time.monotonic()
        if self._pacing:
            self._pacing.disturb()
        try:
            if joins:
                self._join(running.from_here())
            left = self._engine.prefill(row_id, tokens)
        except Exception as error:
            log.exception("the engine failed on the prompt of job %s", running.job.id)
            raise EngineFailed([running.job], error) from error
        self.counters.prompt_tokens += tokens
        self._scheduler.read(row_id, left, time.monotonic() - began)

    def _join(self, row: Row) -> None:
        self._engine.add(row)
        if self._pacing:
            self._pacing.add(row)

    def _step(self) -> list[Emission]:
        rows = self._scheduler.decoding_rows
        slots, scheduler = self._engine.slots, self._scheduler
        depths = None
        if self._pacing:
            depths = self._pacing.before(rows, slots, scheduler.coming, reading=scheduler.reading)
        changes = self._engine.changes
        try:
            emissions = self._engine.step(depths)
        except Exception as error:
            log.exception("the engine failed in a step of %d rows", len(rows))
            jobs = {running.job.id: running.job for running in self._rows.values()}
            started = [job for job in jobs.values() if self.has_started(job)]
            raise EngineFailed(started, error) from error
        if self._pacing:
            if self._engine.changes != changes:
                self._pacing.disturb(CHANGE_STEPS)
            self._pacing.after(emissions)
        self._time_step(max((emission.drafted for emission in emissions), default=0))
        self.counters.stepped(len(rows), emissions)
        for emission in emissions:
            running = self._rows.get(emission.row_id)
            if running is None:
                continue
            running.produced += emission.tokens
            if emission.finish_reason is not None:
                del self._rows[emission.row_id]
                self._forget(emission.row_id)
        return emissions

    def _forget(self, row_id: str) -> None:
        self._scheduler.remove(row_id)
        if self._pacing:
            self._pacing.remove(row_id)

    # Places in the batch

    def _fits(self, row_ids: Sequence[str]) -> bool:
        """Whether the last of these rows can join the others; caches of paused rows give way."""
        *others, newcomer = row_ids
        reading = {newcomer, *filter(self._scheduler.is_reading, others)}
        rows = [(row_id in reading, self._rows[row_id]) for row_id in row_ids]
        sizes = [(running.tokens if reads else 0, running.row.longest) for reads, running in rows]
        if others and not self._budget.fits(sizes):
            return False
        while True:
            paused = [row_id for row_id in self._scheduler.paused_rows if row_id not in row_ids]
            kept = sum(map(self._engine.suspended_bytes, paused))
            if self._budget.fits(sizes, beside=kept):
                return True
            if not paused:
                return not others
            self._engine.remove(paused[0])
            self._scheduler.paused(paused[0], kept=False, tokens=self._rows[paused[0]].tokens)

    def _pause(self, row_id: str) -> None:
        running = self._rows[row_id]
        self._disturb()
        try:
            kept = self._engine.suspend(row_id)
            if not kept:
                self._engine.remove(row_id)
        except Exception as error:
            log.exception("the engine failed to pause a row of job %s", running.job.id)
            raise EngineFailed([running.job], error) from error
        self.counters.pauses += 1
        self._scheduler.paused(row_id, kept, running.tokens)
        log.info("a row of job %s makes place for a more urgent one", running.job.id)

    def _resume(self, row_id: str) -> None:
        running = self._rows[row_id]
        self._disturb()
        try:
            self._engine.resume(row_id)
        except Exception as error:
            log.exception("the engine failed to resume a row of job %s", running.job.id)
            raise EngineFailed([running.job], error) from error

    # Times

    def _time_step(self, depth: int) -> None:
        now, before = time.monotonic(), self._stepped_at
        turns = self._pacing is not None and self._pacing.changes_depth
        self._pace.stepped(None if before is None or turns else now - before, depth)
        self._stepped_at = now

    def _disturb(self) -> None:
        """Neither steps nor chunks take time: how long the next step takes says nothing."""
        self._stepped_at = None
        if self._pacing:
            self._pacing.disturb()
