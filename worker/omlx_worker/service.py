"""The decode thread: commands in, engine steps, emissions out.

The engine is made and used in this thread alone, except `Engine.prepare`. Nothing here waits for
Redis: what a step produced goes to the traffic thread's mailbox, and the next step begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from omlx_worker.active import ActiveJob
from omlx_worker.drafting import DraftCounts
from omlx_worker.engine.interface import Engine, Row
from omlx_worker.messages import (
    Admit,
    Cancel,
    Close,
    Crashed,
    DecodeMailbox,
    DecodeMessage,
    Drain,
    Ended,
    Failed,
    GivenBack,
    Lost,
    MainMailbox,
    Reason,
    Stepped,
    Stop,
    TrafficMailbox,
)
from omlx_worker.pacing import Pacing
from omlx_worker.scheduler import Decode, Idle, Prefill, Scheduler

log = logging.getLogger("omlx_worker.service")

# Engine failures in a row, none of whose jobs finished, after which the engine is given up.
MAX_ENGINE_FAILURES = 3
PRIORITIES = {"high": 0, "default": 1, "bulk": 2}


class EngineBroken(RuntimeError):
    """The engine fails again and again; the process should end and be started anew."""


@dataclass(slots=True)
class Counters:
    """What the engine has done. Written by the decode thread alone."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def mean_batch(self) -> float:
        return self.rows / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        text = f"{self.tokens} tokens in {self.steps} steps, mean batch {self.mean_batch:.1f}"
        drafts = self.drafts
        if not drafts.drafted:
            return text
        places = ", ".join(map(str, drafts.accepted))
        return (
            f"{text}; {drafts.acceptance:.0%} of {drafts.drafted} drafts accepted "
            f"(by position: {places})"
        )


class Service:
    """Runs the rows of admitted jobs until told to stop.

    Args:
        make_engine: called on the decode thread.
        traffic: where emissions and endings go.
        main: told when this thread cannot go on.
        make_pacing: given the engine's greatest depth, makes what decides how deep steps
            draft; without it, as deep as rows may.
        prefill_chunk: prompt tokens read between two decode steps.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        traffic: TrafficMailbox,
        main: MainMailbox,
        *,
        make_pacing: Callable[[int], Pacing] | None = None,
        prefill_chunk: int = 512,
    ) -> None:
        self.counters = Counters()
        self._make_engine = make_engine
        self._traffic = traffic
        self._main = main
        self._make_pacing = make_pacing
        self._pacing: Pacing | None = None
        self._prefill_chunk = prefill_chunk
        self._mailbox: DecodeMailbox = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="omlx-decode", daemon=True)
        self._made = threading.Event()
        self._error: BaseException | None = None
        self._stopped = False
        self._failures = 0
        self._active: dict[str, ActiveJob] = {}
        self._rows: dict[str, tuple[Row, ActiveJob]] = {}

    # Any thread

    def start(self) -> Engine:
        """Start the thread, which loads the model.

        Raises:
            whatever ``make_engine`` raised.
        """
        self._thread.start()
        self._made.wait()
        if self._error is not None:
            raise self._error
        return self._engine

    def submit(self, message: DecodeMessage) -> None:
        self._mailbox.put(message)

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; returns whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # The decode thread

    def _run(self) -> None:
        try:
            self._engine = self._make_engine()
            if self._make_pacing:
                self._pacing = self._make_pacing(self._engine.max_depth)
            self._scheduler = Scheduler(self._engine.max_rows, self._prefill_chunk)
        except BaseException as error:  # noqa: BLE001 (raised again by `start`)
            self._error = error
            return
        finally:
            self._made.set()
        try:
            while not self._stopped:
                self._act()
        except Exception as error:
            log.exception("the decode thread ends")
            self._main.put(Crashed(error))
        finally:
            self._give_back_all()
            self._traffic.put(Close())
            self._close_engine()

    def _act(self) -> None:
        self._read_mailbox()
        if self._stopped:
            return
        match self._scheduler.next():
            case Prefill(row_id, tokens, joins):
                self._prefill(row_id, tokens, joins)
            case Decode():
                self._decode()
            case Idle():
                self._obey(self._mailbox.get())

    def _read_mailbox(self) -> None:
        with suppress(Empty):
            while not self._stopped:
                self._obey(self._mailbox.get_nowait())

    def _obey(self, message: DecodeMessage) -> None:
        match message:
            case Admit(job):
                self._admit(job)
            case Cancel(claim, reason):
                running = self._active.get(claim.id)
                if running is not None and running.claim is claim:
                    self._end(running, reason)
            case Drain():
                for job in list(self._active.values()):
                    if not self._has_started(job):
                        self._end(job, GivenBack())
            case Stop():
                self._stopped = True

    def _admit(self, job: ActiveJob) -> None:
        earlier = self._active.get(job.id)
        if earlier is not None:
            # Its lease ran out and this very worker claimed it again.
            self._end(earlier, Lost())
        self._traffic.put(Admit(job))
        self._active[job.id] = job
        priority = PRIORITIES.get(job.claim.queue.rpartition(":")[2], PRIORITIES["default"])
        for row in job.rows:
            self._rows[row.row_id] = (row, job)
            self._scheduler.add(row.row_id, len(row.prompt), priority)

    def _prefill(self, row_id: str, tokens: int, joins: bool) -> None:
        row, job = self._rows[row_id]
        if self._pacing:
            self._pacing.disturb()
        try:
            if joins:
                self._engine.add(row)
                if self._pacing:
                    self._pacing.add(row)
            left = self._engine.prefill(row_id, tokens)
        except Exception as error:
            log.exception("the engine failed on the prompt of job %s", job.id)
            self._blame([job], error)
        else:
            self._scheduler.read(row_id, left)

    def _decode(self) -> None:
        rows = self._scheduler.decoding
        depths = self._pacing.before(self._scheduler.decoding_rows) if self._pacing else None
        try:
            emissions = self._engine.step(depths)
        except Exception as error:
            log.exception("the engine failed in a step of %d rows", rows)
            self._blame([job for job in self._active.values() if self._has_started(job)], error)
            return
        if self._pacing:
            self._pacing.after(emissions)
        self.counters.steps += 1
        self.counters.rows += rows
        for emission in emissions:
            self.counters.tokens += len(emission.tokens)
            self.counters.drafts.add(emission)
            if emission.finish_reason is not None and emission.row_id in self._rows:
                self._finish_row(emission.row_id)
        if emissions:
            self._traffic.put(Stepped(emissions))

    def _has_started(self, job: ActiveJob) -> bool:
        return any(self._scheduler.has_joined(row.row_id) for row in job.rows)

    def _finish_row(self, row_id: str) -> None:
        self._scheduler.remove(row_id)
        if self._pacing:
            self._pacing.remove(row_id)
        _, job = self._rows.pop(row_id)
        if not any(row.row_id in self._rows for row in job.rows):
            del self._active[job.id]
            self._failures = 0

    def _blame(self, jobs: list[ActiveJob], error: Exception) -> None:
        """Fail the jobs that were running when the engine raised."""
        reason = Failed(f"the engine failed on this job: {type(error).__name__}: {error}")
        for job in jobs:
            self._end(job, reason)
        self._failures += 1
        if self._failures >= MAX_ENGINE_FAILURES:
            raise EngineBroken(
                f"the engine failed {self._failures} times in a row, lastly with: {error}"
            ) from error

    def _end(self, job: ActiveJob, reason: Reason) -> None:
        del self._active[job.id]
        for row in job.rows:
            if self._rows.pop(row.row_id, None) is None:
                continue
            if self._scheduler.has_joined(row.row_id):
                try:
                    self._engine.remove(row.row_id)
                except Exception:
                    log.exception("the engine failed to drop row %s", row.row_id)
            self._scheduler.remove(row.row_id)
            if self._pacing:
                self._pacing.disturb()
                self._pacing.remove(row.row_id)
        self._traffic.put(Ended(job.claim, reason))

    def _close_engine(self) -> None:
        try:
            self._engine.close()
        except Exception:
            log.exception("the engine failed to close")

    def _give_back_all(self) -> None:
        with suppress(Empty):
            while True:
                message = self._mailbox.get_nowait()
                if isinstance(message, Admit):
                    self._traffic.put(Ended(message.job.claim, GivenBack()))
        for job in list(self._active.values()):
            self._end(job, GivenBack())
