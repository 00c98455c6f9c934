"""The decode thread: commands in, engine steps, emissions out.

The engine is made and used in this thread, but for what `Engine` lets any call. Nothing here waits
for Redis: what a step produced goes to the traffic thread's mailbox, and the next step begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue

from omlx_producer.wire import End, InvalidRequest
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth_driver import DepthDriver, make_policy
from omlx_worker.decode.loop import DecodeLoop, EngineFailed
from omlx_worker.delivery.outbox import Outbox
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.interface import FIRST_ROWS, FIXED_CHUNK, LONGEST_CHUNK, Engine, Tell
from omlx_worker.engine.rows.row import Stage
from omlx_worker.job import ActiveJob
from omlx_worker.messages import (
    Admit,
    Crashed,
    DecodeMailbox,
    DecodeMessage,
    Drain,
    Drop,
    GivenBack,
    Lost,
    MainMailbox,
    Reason,
    Stepped,
    Stop,
    TrafficMailbox,
)
from omlx_worker.settings import WorkerSettings

log = logging.getLogger("omlx_worker.decode.thread")

MAX_ENGINE_FAILURES = 3
"""Failures in a row, without a finished job between them, after which the engine is given up."""

FULL_SECONDS = 0.05
"""How often a full outbox is checked again; messages are read at once."""

MakeEngine = Callable[[Tell], Engine]


class EngineBroken(RuntimeError):
    """The engine fails again and again; the process should end and be started anew."""


class DecodeThread:
    """Runs the rows of admitted jobs until told to stop.

    Args:
        make_engine: called on the decode thread.
        traffic: where emissions and endings go.
        main: told when this thread cannot go on.
        outside: see `MemoryBudget`; called from any thread.

    Attributes:
        outbox: counts what is not written yet; while it is full, no step runs.
        progress: what the thread does while it loads the model, in words.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        make_engine: MakeEngine,
        traffic: TrafficMailbox,
        main: MainMailbox,
        *,
        outside: Callable[[], int] = lambda: 0,
    ) -> None:
        self.counters = Counters()
        self._settings = settings
        self._make_engine = make_engine
        self._traffic = traffic
        self._main = main
        self._outside = outside
        self.outbox = Outbox()
        self._mailbox: DecodeMailbox = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="omlx-decode", daemon=True)
        self._made: Future[Engine] = Future()
        self.progress = ""
        self._stopped = False
        self._failures = 0
        self._active: dict[str, ActiveJob] = {}

    # Any thread

    def start(self) -> Future[Engine]:
        """Start the thread, which loads the model.

        Returns:
            The engine once it is made, or what its making raised.
        """
        self._thread.start()
        return self._made

    def submit(self, message: DecodeMessage) -> None:
        self._mailbox.put(message)

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; returns whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # The decode thread

    def _run(self) -> None:
        try:
            self._engine = engine = self._make_engine(self._tell)
            limit = self._settings.memory_limit or engine.memory_budget
            engine.keep_within(limit)
            self.budget = MemoryBudget(limit, engine.weight_bytes, engine.bytes_for, self._outside)
            policy = make_policy(self._settings.mode, engine.max_depth, engine.own_depth)
            self.driver = DepthDriver(policy, self._settings.max_batch or FIRST_ROWS)
            self._loop = DecodeLoop(
                engine,
                self.budget,
                self.counters,
                driver=self.driver,
                chunks=ChunkSize(LONGEST_CHUNK, FIXED_CHUNK if self._settings.fixed_shapes else 1),
            )
            parts, part = engine.first_parts, 1
            self._tell(f"warming up {part} of {parts}")
            while engine.warm_up(first=True):
                part += 1
                self._tell(f"warming up {min(part, parts)} of {parts}")
        except BaseException as error:  # noqa: BLE001 (raised again by `start`)
            self._made.set_exception(error)
            return
        self._made.set_result(engine)
        try:
            while not self._stopped:
                self._act()
        except Exception as error:
            log.exception("the decode thread ends")
            self._main.put(Crashed(error))
        finally:
            self._traffic.put(Stop())
            self._close_engine()

    def _tell(self, progress: str) -> None:
        self.progress = progress

    def _act(self) -> None:
        self._read_mailbox()
        if self._stopped:
            return
        if not self.outbox.has_room:
            with suppress(Empty):
                self._obey(self._mailbox.get(timeout=FULL_SECONDS))
            return
        try:
            emissions = self._loop.act()
        except EngineFailed as failure:
            self._blame(failure)
            return
        if emissions is None and not self._engine.warm_up():
            self._obey(self._mailbox.get())
            return
        if emissions:
            self._report(emissions)

    def _read_mailbox(self) -> None:
        with suppress(Empty):
            while not self._stopped:
                self._obey(self._mailbox.get_nowait())

    def _obey(self, message: DecodeMessage) -> None:
        match message:
            case Admit(jobs):
                self._admit(jobs)
            case Drop(claim, reason):
                running = self._active.get(claim.id)
                if running is not None and running.claim is claim:
                    self._end(running, reason)
            case Drain():
                for job in list(self._active.values()):
                    if all(row.stage is Stage.WAITING for row in job.rows):
                        self._end(job, GivenBack())
            case Stop():
                self._stopped = True

    def _admit(self, jobs: Sequence[ActiveJob]) -> None:
        for job in jobs:
            if earlier := self._active.get(job.id):
                # Its lease ran out and this very worker claimed it again.
                self._end(earlier, Lost())
        self._traffic.put(Admit(jobs))
        for job in jobs:
            self._active[job.id] = job
            self._loop.add(job.rows)

    def _report(self, emissions: list[Emission]) -> None:
        if errors := {each.row_id: each.error for each in emissions if each.error}:
            emissions = self._fail(errors, emissions)
        self.outbox.add(emissions)
        self._traffic.put(Stepped(emissions))
        if not any(emission.finish_reason for emission in emissions):
            return
        for job in [job for job in self._active.values() if job.produced]:
            del self._active[job.id]
            self._failures = 0

    def _fail(
        self, errors: Mapping[str, InvalidRequest], emissions: list[Emission]
    ) -> list[Emission]:
        """Fail the jobs of rows with errors; returns the emissions of the others."""
        failed: set[str] = set()
        for job in list(self._active.values()):
            row_ids = [row.row_id for row in job.rows]
            if error := next((errors[row_id] for row_id in row_ids if row_id in errors), None):
                self._end(job, End.refusing(error))
                failed.update(row_ids)
        return [emission for emission in emissions if emission.row_id not in failed]

    def _blame(self, failure: EngineFailed) -> None:
        """Fail the jobs that were running when the engine raised."""
        reason = End.failing(f"the engine failed on this job: {failure}")
        for job in list(self._active.values()):
            if any(row in failure.rows for row in job.rows):
                self._end(job, reason)
        self._failures += 1
        if self._failures >= MAX_ENGINE_FAILURES:
            raise EngineBroken(
                f"the engine failed {self._failures} times in a row, lastly with: {failure}"
            ) from failure.__cause__

    def _end(self, job: ActiveJob, reason: Reason) -> None:
        del self._active[job.id]
        self._loop.drop(job.rows)
        self._traffic.put(Drop(job.claim, reason))

    def _close_engine(self) -> None:
        try:
            self._engine.close()
        except Exception:
            log.exception("the engine failed to close")
