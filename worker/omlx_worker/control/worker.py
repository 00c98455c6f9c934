"""The main thread: claims jobs, hands them to the decode thread, and answers RQ, users and signals.

`GenerationWorker` is a worker of RQ that never forks and runs many jobs at once, of one model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from random import random
from types import FrameType
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError, RedisError

from omlx_producer.outage import Outage
from omlx_producer.wire import ModelInfo
from omlx_worker.control.loaded import THREAD_SECONDS, LoadedModel, MakeEngine
from omlx_worker.control.rq_record import RecordedWorker
from omlx_worker.control.status import StatusBoard, Turn, UnloadedBoard
from omlx_worker.decode.thread import DecodeThread, EngineBroken
from omlx_worker.delivery.job_log import JobCounts, JobLog
from omlx_worker.delivery.observers import Observers
from omlx_worker.engine.rows.interface import Engine, Tell
from omlx_worker.mac.machine import Mac
from omlx_worker.messages import (
    Crashed,
    MainMessage,
    Prepared,
    Ring,
    StopJob,
)
from omlx_worker.queue.upkeep import Upkeep
from omlx_worker.settings import WorkerSettings

log = logging.getLogger("omlx_worker.worker")

POLL_SECONDS = 0.25
# Between the looks of an idle worker, for jobs that nobody rings for. The looks of 100 workers
# take 2% of a Redis server's time.
LOOK_SECONDS = 2.0

Describe = Callable[[WorkerSettings], ModelInfo]
"""What a model is, by its files. It may raise `ModelError`."""


class RedisGone(ConnectionError):
    """Redis was away for longer than ``redis_grace``: for these seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"unavailable for {seconds:.0f} s, longer than --redis-grace")


class GenerationWorker(RecordedWorker):
    """Serves the queues of one model alias.

    Args:
        make_engine: called on the decode thread.
        describe: without it the model is announced once it was loaded.
        machine: that it runs on.
        outside: see `MemoryBudget`; called from any thread.
        turn: of a child of `ModelsInTurn`, which has the same name; None for any other worker.

    Attributes:
        observers: of its jobs.
        board: tells the figures of the model.
        unreachable: whether Redis was away when it ended.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        make_engine: MakeEngine,
        *,
        connection: Redis,
        describe: Describe | None = None,
        machine: Mac | None = None,
        outside: Callable[[], int] = lambda: 0,
        turn: Turn | None = None,
    ) -> None:
        self._machine = machine or Mac()
        self._settings = settings
        super().__init__(
            settings.queues,
            connection=connection,
            name=settings.name,
            models=[settings.alias],
            is_child=turn is not None,
        )
        self._turn_of_model = turn
        self._describe, self._load_engine = describe, make_engine
        self._jobs = JobCounts()
        self.observers = Observers(JobLog(), self._jobs)
        self.loaded = LoadedModel(
            settings,
            connection,
            self.name,
            make_engine=self._make_engine,
            main=self._mailbox,
            observers=self.observers,
            outside=outside,
        )
        self.leases = self.loaded.leases
        self._upkeep = Upkeep(self.leases)
        self._unloaded = UnloadedBoard(connection, self.alias, self.name, self.loaded.moment)
        self.board: UnloadedBoard | StatusBoard = self._unloaded
        self.unreachable = False
        self._draining = False
        # Until when jobs may run once it winds down.
        self._jobs_end_by = 0.0
        self._error: BaseException | None = None
        self._outage = Outage(log=log)
        self._served = False
        # Whether a message has come since the last look at the queues, and when the next is due.
        self._rung, self._look_at = True, 0.0

    @property
    def decode_thread(self) -> DecodeThread:
        return self.loaded.decode_thread

    @property
    def alias(self) -> str:
        """Of its model."""
        return self._settings.alias

    # The loop

    def work(self, burst: bool = False, **_: Any) -> bool:  # type: ignore[override]
        """Serve until told to stop or, in a burst, until the queues are empty.

        Returns:
            whether any job was taken.

        Raises:
            ModelError: if the files of the model cannot be used.
            RedisGone: if Redis is away for longer than ``redis_grace`` seconds.
            Exception: what the engine raised when it was made, or when it broke, and errors of
                Redis that do not pass.
        """
        with self._signals.caught():
            try:
                while self._turn(burst):
                    self._listen(self.loaded.patience or POLL_SECONDS)
            except Exception as error:  # noqa: BLE001 (raised below)
                self._error = error
            finally:
                self._shut_down()
        if self._error is not None:
            raise self._error
        return self._served

    def _turn(self, burst: bool) -> bool:
        """Do what is due; returns whether to go on."""
        if self._error is not None or self._signals.at_once:
            return False
        self._machine.keep_awake(len(self.leases) > 0 or self.loaded.is_loading)
        if self.redis_away > self._settings.redis_grace:
            raise RedisGone(self.redis_away)
        if self._signals.asked and not self._draining:
            self._draining = True
            self._wind_down()
        self.loaded.fail_timed_out()
        try:
            goes_on = self._attend(burst)
        except RedisError as error:
            pause = self._outage.failed(error)
            self._upkeep.postpone()
            self._listen(pause)
            return not self._draining or self._finishes_jobs
        self._outage.answered()
        return goes_on

    def _attend(self, burst: bool) -> bool:
        """The part of a turn that needs Redis."""
        if self._outage.seconds:
            self.connection.ping()
        self.appear()
        # Jobs first: their users wait.
        goes_on = self._serve(burst)
        self.show(self.leases, self.loaded.is_paused)
        self.board.show(self._condition)
        if self.beat():
            self.board.announce()
        return goes_on

    def _make_engine(self, settings: WorkerSettings, tell: Tell) -> Engine:
        """Describe the model, then load it. Runs on the decode thread."""
        if self._describe is not None:
            tell("reading its configuration")
            self._unloaded.info = self._describe(settings)
        return self._load_engine(settings, tell)

    def _begin(self) -> None:
        """The model is loaded."""
        model, turn = self.loaded, self._turn_of_model
        model.serve()
        counters = self.decode_thread.counters
        if turn is not None:
            counters.switches, counters.switch_seconds = turn.switches, turn.switch_seconds
            if turn.left_at is not None:
                counters.switch_seconds += time.monotonic() - turn.left_at
        self.board = StatusBoard(
            self.connection,
            self.alias,
            self.name,
            self._settings.mode,
            model.engine.info,
            counters=counters,
            jobs=self._jobs,
            leases=self.leases,
            budget=self.decode_thread.budget,
            driver=self.decode_thread.driver,
        )
        by, depth = model.engine.drafters, model.engine.max_depth
        drafts = f"drafts up to {depth} a step by {by}" if by else "no drafts"
        page = f"; the page is at {self._settings.page}" if self._settings.page else ""
        log.info(
            "%s is ready: worker %s, %s (--mode %s)%s",
            *(self.alias, self.name, drafts, self._settings.mode, page),
        )
        # Whoever knows the model finds its worker.
        self.board.show(self._condition)
        self.board.announce()

    def _serve(self, burst: bool) -> bool:
        """Take jobs; returns whether to go on."""
        if self._draining:
            return self._finishes_jobs
        self._upkeep.attend()
        loaded = self.loaded
        if loaded.loading is None:
            loaded.load()
        if loaded.admission is None:
            if not loaded.is_made:
                return True
            self._begin()
        # Jobs may end while others are taken; a burst ends if there was nothing before either.
        idle = len(self.leases) == 0
        if idle and not (burst or self._rung or time.monotonic() >= self._look_at):
            return True
        self._rung = False
        # Workers that started together do not look together.
        self._look_at = time.monotonic() + LOOK_SECONDS * (0.5 + random() / 2)
        taken = loaded.take()
        self._served |= taken
        return not (burst and idle and not taken)

    def _wind_down(self) -> None:
        """Start no job, and leave those that run ``drain_timeout`` seconds."""
        log.info("draining; running jobs have %.0f s to finish", self._settings.drain_timeout)
        self._jobs_end_by = time.monotonic() + self._settings.drain_timeout
        self.loaded.wind_down()

    @property
    def _finishes_jobs(self) -> bool:
        """After `_wind_down`: whether jobs run and have time."""
        return len(self.leases) > 0 and time.monotonic() < self._jobs_end_by

    @property
    def redis_away(self) -> float:
        """Seconds since Redis answered last; 0 while it does."""
        return max(self._outage.seconds, self.loaded.publisher.outage.seconds)

    @property
    def redis_failures(self) -> int:
        """Calls that an outage has failed."""
        return self._outage.failures + self.loaded.publisher.outage.failures

    @property
    def _condition(self) -> str:
        if self._draining:
            return "draining"
        return "paused" if self.loaded.is_paused else "busy" if len(self.leases) else "idle"

    # Messages

    def _listen(self, timeout: float) -> None:
        """Wait for a message, then handle all waiting ones."""
        with suppress(Empty):
            self._handle(self._mailbox.get(timeout=timeout))
            while True:
                self._handle(self._mailbox.get_nowait())

    def _handle(self, message: MainMessage) -> None:
        self._rung = True
        match message:
            case Ring():
                pass
            case StopJob() | Prepared():
                self.loaded.handle(message)
            case Crashed(error):
                self._error = error

    # The end

    def _drains(self) -> bool:
        return self.loaded.admission is not None

    @property
    def exit_code(self) -> int:
        """After `work`: 128 + signal after a stop at once, else 0."""
        return self._signals.exit_code

    def request_stop(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Drain; at the second call, stop at once."""
        self._signals.receive(signum)

    def _shut_down(self) -> None:
        """End the threads, and give back the remaining jobs unless one of them may be to blame."""
        # An orderly exit needs the end of loading, too.
        while not (self.loaded.is_made or self._signals.at_once):
            self._listen(POLL_SECONDS)
        at_once = self._signals.at_once
        self.loaded.close(0.5 if at_once else THREAD_SECONDS, gives_back=self._error is None)
        if not at_once:
            self._listen(0)
        try:
            held = self.leases.jobs()
            if self._error is None or isinstance(self._error, RedisError | EngineBroken):
                # This undoes a claim whose answer was lost.
                self.leases.claim(0)
                self.leases.give_back(held)
                for claim in held:
                    self.observers.ended(claim, outcome="given back")
            self.disappear()
            self._upkeep.leave()
            if self._turn_of_model is None:
                self.board.sign_off()
        except RedisError as error:
            log.warning("Redis does not answer (%s); the leases will expire", error)
            self.unreachable = True
        # One of them may be the cause of an error. Only an expired lease counts as a crash.
        for claim in self.leases.jobs():
            self.observers.ended(claim, outcome="abandoned", error="its lease will expire")
        self._machine.keep_awake(False)
        if self.loaded.admission is not None:
            log.info("in total, %s: %s", self.alias, self.decode_thread.counters)
        elif self._error is None:
            log.info("ended before %s was loaded", self.alias)
