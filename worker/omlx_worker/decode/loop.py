"""The rows of this worker between scheduler and engine: does what is due, one act at a time.

Knows no threads, no jobs and no Redis. The decode thread calls `act` again and again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from omlx_producer.terminal import counted
from omlx_worker.decode.actions import Decode, Evict, Idle, Join, Pause, Prefill, Resume
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.clock import StepClock
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth_driver import DepthDriver
from omlx_worker.decode.row import BULK, DecodeRow
from omlx_worker.decode.scheduler import Scheduler
from omlx_worker.engine.rows.interface import Engine
from omlx_worker.engine.rows.row import Emission

log = logging.getLogger("omlx_worker.decode.loop")


class EngineFailed(RuntimeError):
    """The engine raised.

    Attributes:
        rows: those that it was running.
    """

    def __init__(self, rows: Sequence[DecodeRow], error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.rows = list(rows)


class DecodeLoop:
    """Rows from their admission to their last token.

    Args:
        driver: decides how deep steps draft, and how many rows run.
        chunks: how many prompt tokens are read at a time.
    """

    def __init__(
        self,
        engine: Engine,
        budget: MemoryBudget,
        counters: Counters,
        *,
        driver: DepthDriver,
        chunks: ChunkSize,
    ) -> None:
        self.counters = counters
        self._engine = engine
        self._driver = driver
        self._chunks = chunks
        driver.batch_size.limit_to(engine.max_rows)
        self._scheduler = Scheduler(
            driver.batch_size.rows,
            chunks,
            budget,
            shares=engine.shares,
            pads=engine.pads,
        )
        self._clock = StepClock()

    def add(self, rows: Sequence[DecodeRow]) -> None:
        for row in rows:
            self._scheduler.add(row)

    def drop(self, rows: Sequence[DecodeRow]) -> None:
        """Remove rows before the next step. Rows that are done are ignored."""
        for row in rows:
            if row.in_engine:
                self._clock.interrupt()
                try:
                    self._engine.remove(row.row_id)
                except Exception:
                    log.exception("the engine failed to drop row %s", row.row_id)
            self._scheduler.remove(row)

    def act(self) -> list[Emission] | None:
        """Do what is due next.

        Returns:
            What was produced, or None when there is nothing to do.

        Raises:
            EngineFailed: the rows that it names are to be dropped.
        """
        engine, counters = self._engine, self.counters
        traces, contests = engine.traces, engine.contests
        try:
            return self._act()
        finally:
            counters.traces += engine.traces - traces
            counters.contests += engine.contests - contests
            self.counters.rows = self._scheduler.joined
            self.counters.waiting = self._scheduler.waiting

    def _act(self) -> list[Emission] | None:
        action = self._scheduler.next()
        match action:
            case Decode():
                return self._step()
            case Idle():
                self._clock.interrupt()
                self._count_pages()
                return None
        try:
            match action:
                case Join(row, room):
                    self._join(row, room)
                case Prefill():
                    return self._prefill(action)
                case Pause(row):
                    self._pause(row)
                case Resume(row, room):
                    self._clock.interrupt()
                    self._engine.limit_prefixes(room)
                    self._engine.resume(row.row_id)
                case Evict(row):
                    self._engine.remove(row.row_id)
        except Exception as error:
            kind = type(action).__name__.lower()
            rows = action.rows if isinstance(action, Prefill) else [action.row]
            names = ", ".join(row.row_id for row in rows)
            log.exception("the engine failed to %s row %s", kind, names)
            raise EngineFailed(rows, error) from error
        return []

    def _join(self, row: DecodeRow, room: int) -> None:
        self._engine.limit_prefixes(room)
        known = self._engine.add(row.resumed)
        if known.cached:
            self._clock.interrupt()  # a prefix is copied
        self.counters.cached_tokens += known.cached
        self._scheduler.took(row, known)

    def _prefill(self, action: Prefill) -> list[Emission]:
        began = time.monotonic()
        self._clock.chunk()
        tokens = {row.row_id: count for row, count in action.tokens.items()}
        keep = [row.row_id for row, count in action.tokens.items() if row.stops_after(count)]
        engine = self._engine
        traces, contests = engine.traces, engine.contests
        left = engine.prefill(tokens, keep)
        seconds = time.monotonic() - began
        timed = (engine.traces, engine.contests) == (traces, contests)
        if not timed:
            self._clock.interrupt()
        self.counters.prompt_windows += any(tokens.values())
        # The first step of a row reads the last token of its prompt.
        self.counters.prompt_tokens += sum(tokens.values()) + list(left.values()).count(0)
        self._scheduler.read(action, left, seconds if timed else None)
        if all(row.left or not row.request.reports for row in action.rows):
            return []
        emissions = self._engine.reported()
        for emission in emissions:
            row = self._scheduler.get(emission.row_id)
            if row is not None and emission.finish_reason is not None:
                self._scheduler.remove(row)
            elif row is not None:
                # It may read its prompt again, but tells the scores once.
                row.request = replace(row.request, prompt_logprobs=None)
        return emissions

    def _pause(self, row: DecodeRow) -> None:
        self._clock.interrupt()
        kept = self._engine.suspend(row.row_id)
        if kept is None:
            self._engine.remove(row.row_id)
        self._scheduler.paused(row, kept)
        self.counters.pauses += 1
        log.info("row %s makes room for a more urgent one", row.row_id)

    def _count_pages(self) -> None:
        """Warn once more pages are miscounted."""
        before, wrong = self.counters.miscounted_pages, self._engine.miscounted_pages()
        if wrong > before:
            log.warning(
                "%s of the caches %s miscounted, a fault of this version: memory may be lost and "
                "texts wrong until the worker is restarted",
                *(counted(wrong, "page"), "is" if wrong == 1 else "are"),
            )
        self.counters.miscounted_pages = wrong

    def _step(self) -> list[Emission]:
        scheduler, engine = self._scheduler, self._engine
        rows = scheduler.decoding
        depths = self._driver.before(rows, engine.slots, scheduler.coming)
        size = self._driver.batch_size
        size.step(scheduler.joined, hurried=any(row.level < BULK for row in rows))
        scheduler.max_rows, scheduler.bulk_rows = size.places, size.rows
        stalls, contests = engine.stalls, engine.contests
        try:
            emissions = engine.step(depths)
        except Exception as error:
            log.exception("the engine failed in a step of %s", counted(len(rows), "row"))
            raise EngineFailed([row for row in scheduler.rows if row.in_engine], error) from error
        if engine.stalls != stalls or engine.contests != contests:
            self._clock.traced()
        self._time(emissions)
        self.counters.stepped(len(rows), emissions)
        for emission in emissions:
            row = scheduler.get(emission.row_id)
            if row is None:
                continue
            row.tokens += emission.tokens
            if emission.finish_reason is not None:
                scheduler.remove(row)
            elif emission.rejoins:
                scheduler.paused(row, None)
        return emissions

    def _time(self, emissions: Sequence[Emission]) -> None:
        """Tell those who learn from it how long the step took."""
        seconds, alone = self._clock.step()
        self._driver.after(emissions, seconds if alone else None)
        depth = max((emission.drafted for emission in emissions), default=0)
        self._chunks.stepped(None if self._driver.changes_depth else seconds, depth)
