"""Runs the rows of this worker: asks the scheduler what is due, and lets the engine do it.

Knows no threads, no jobs and no Redis. The decode thread calls `act` again and again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from operator import sub

from omlx_producer.terminal import counted
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.clock import TRACED_STEPS, StepClock
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth_driver import DepthDriver
from omlx_worker.decode.scheduler import Act, Scheduler
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.interface import Delays, Engine
from omlx_worker.engine.rows.row import BULK, Row, Stage

log = logging.getLogger("omlx_worker.decode.loop")


class EngineFailed(RuntimeError):
    """The engine raised.

    Attributes:
        rows: those that it was running.
    """

    def __init__(self, rows: Sequence[Row], error: Exception) -> None:
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
        driver.batch_size.limit_to(engine.max_rows)
        self._scheduler = Scheduler(
            driver.batch_size.rows,
            chunks,
            budget,
            shares=engine.shares,
            pads=engine.pads,
        )
        self._clock = StepClock()

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._scheduler.add(row)

    def drop(self, rows: Sequence[Row]) -> None:
        """Remove rows before the next step. Rows that are done are ignored."""
        for row in rows:
            if row.in_engine:
                self._clock.interrupt()
                try:
                    self._engine.remove(row)
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
        act = self._scheduler.next()
        began, before = time.monotonic(), self._engine.delays
        try:
            emissions = self._run(act)
        except Exception as error:
            raise self._failure(act, error) from error
        delays = Delays(*map(sub, self._engine.delays, before))
        seconds = time.monotonic() - began
        self._learn(act, emissions or [], seconds, delays)
        self._count(act, emissions or [], seconds, delays)
        for emission in emissions or []:
            self._end(emission)
        return emissions

    def _run(self, act: Act) -> list[Emission] | None:
        """Let the engine do what is due."""
        if act.row:
            return self._move(act.row)
        if act.look:
            self._engine.look(act.look)
            return []
        if act.chunk:
            return self._engine.read(act.chunk.tokens)
        if act.rows:
            return self._engine.step(self._plan(act.rows))
        self._count_pages()
        return None

    def _move(self, row: Row) -> list[Emission]:
        """Let the engine follow a row that has changed its stage."""
        engine = self._engine
        if row.in_batch:
            engine.limit_prefixes(self._scheduler.room)
        match row.stage:
            case Stage.READING:
                self._scheduler.shared(row, engine.add(row))
            case Stage.DECODING:
                engine.resume(row)
            case Stage.SUSPENDED:
                engine.suspend(row)
                log.info("row %s makes room for a more urgent one", row.row_id)
            case Stage.WAITING:
                engine.remove(row)
        return []

    def _plan(self, rows: list[Row]) -> int:
        """How deep the next step drafts; says how many rows may run beside these."""
        scheduler, size = self._scheduler, self._driver.batch_size
        depth = self._driver.before(rows, self._engine.slots)
        size.step(scheduler.joined, hurried=any(row.level < BULK for row in rows))
        scheduler.max_rows, scheduler.bulk_rows = size.places, size.rows
        return depth

    def _failure(self, act: Act, error: Exception) -> EngineFailed:
        rows = [row for row in (act.row, act.look) if row] or (act.chunk.rows if act.chunk else [])
        rows = rows or [row for row in self._scheduler.rows if row.in_engine]
        log.exception("the engine failed with %s", ", ".join(row.row_id for row in rows))
        return EngineFailed(rows, error)

    def _learn(
        self, act: Act, emissions: Sequence[Emission], seconds: float, delays: Delays
    ) -> None:
        """Tell those who learn from it how long an act took."""
        clock = self._clock
        if act.row:
            # What a row without a kept beginning takes to join is next to nothing.
            if act.row.computed or act.row.stage is not Stage.READING:
                clock.interrupt()
        elif act.look:
            clock.interrupt()
        elif act.chunk:
            clock.interrupt()
            timed = not (delays.traces or delays.contests)
            self._scheduler.read(act.chunk, seconds if timed else None)
        elif act.rows:
            if any(delays):
                clock.interrupt(TRACED_STEPS)
            self._driver.after(emissions, clock.step())
        else:
            clock.interrupt()

    def _count(
        self, act: Act, emissions: Sequence[Emission], seconds: float, delays: Delays
    ) -> None:
        counters = self.counters
        counters.traces += delays.traces
        counters.contests += delays.contests
        if act.row:
            counters.cached_tokens += act.row.computed * (act.row.stage is Stage.READING)
            counters.pauses += act.row.stage is Stage.SUSPENDED
        elif act.look:
            counters.pictures += 1
            counters.picture_seconds += seconds
        elif act.chunk:
            tokens = act.chunk.tokens
            counters.prompt_windows += any(tokens.values())
            # The first step of a row reads the last token of its prompt.
            stepping = sum(not (row.left or row.request.unread) for row in tokens)
            counters.prompt_tokens += sum(tokens.values()) + stepping
        elif act.rows:
            counters.stepped(len(act.rows), emissions)
        counters.rows = self._scheduler.joined
        counters.waiting = len(self._scheduler.rows) - counters.rows

    def _end(self, emission: Emission) -> None:
        """Forget a row that has ended; one that rejoins waits anew."""
        if emission.finish_reason is None and not emission.rejoins:
            return
        row = self._scheduler.get(emission.row_id)
        if row is not None and emission.rejoins:
            self._scheduler.rejoin(row)
        elif row is not None:
            self._scheduler.remove(row)

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
