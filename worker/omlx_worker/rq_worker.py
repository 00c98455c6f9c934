"""The worker as RQ sees it, and the main thread: claims, commands, signals, the worker's record.

`GenerationWorker` never forks and runs many jobs at once. RQ's loop of take one, run one is
replaced by: take what there is room for, hand it to the decode thread, wait for news.
"""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from omlx_producer.protocol import MODELS_KEY, PRIORITIES, queue_name, wake_channel
from omlx_worker.active import ActiveJob
from omlx_worker.engine.interface import Engine
from omlx_worker.intake import Intake
from omlx_worker.lease import LeaseTable
from omlx_worker.messages import (
    Admit,
    Cancel,
    Close,
    Crashed,
    Drain,
    Ended,
    Failed,
    GivenBack,
    MainMailbox,
    MainMessage,
    NeedsRQ,
    Reason,
    Ring,
    Stop,
    StopJob,
    Stopped,
    TrafficMailbox,
)
from omlx_worker.pacing import Pacing
from omlx_worker.publisher import TROUBLE, Publisher
from omlx_worker.rq_endings import end_through_rq
from omlx_worker.rq_record import RecordedWorker
from omlx_worker.service import Service

log = logging.getLogger("omlx_worker.worker")

# Jobs enqueued by stock RQ do not ring: how long they may wait for an idle worker.
POLL_SECONDS = 0.25
LONGEST_PAUSE = 5.0
STOP_SECONDS = 5.0


class GenerationWorker(RecordedWorker):
    """Serves the queues of one model alias.

    Args:
        make_engine: called once, on the thread that will use the engine.
        make_pacing: see `Service`.

    Attributes:
        exit_code: for the process, after `work`: 0, or 128 + signal when it was stopped at once.
    """

    def __init__(
        self,
        model_alias: str,
        make_engine: Callable[[], Engine],
        *,
        connection: Redis,
        name: str | None = None,
        make_pacing: Callable[[int], Pacing] | None = None,
        lease_seconds: float = 30.0,
        prefill_chunk: int = 512,
        drain_timeout: float = 60.0,
        stream_ttl: int = 86_400,
    ) -> None:
        names = [queue_name(model_alias, priority) for priority in PRIORITIES]
        self._mailbox: MainMailbox = SimpleQueue()
        super().__init__(
            names,
            connection=connection,
            name=name,
            bell=wake_channel(model_alias),
            mailbox=self._mailbox,
        )
        self.model_alias = model_alias
        self._drain_timeout = drain_timeout
        self._leases = LeaseTable(
            connection,
            self.name,
            names,
            seconds=lease_seconds,
            stream_ttl=stream_ttl,
            on_free=lambda: self._mailbox.put(Ring()),
        )
        self._traffic: TrafficMailbox = SimpleQueue()
        self.service = Service(
            make_engine,
            self._traffic,
            self._mailbox,
            make_pacing=make_pacing,
            prefill_chunk=prefill_chunk,
        )
        self._publisher = Publisher(self._leases, self._traffic, self._mailbox, self.service.submit)
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self.exit_code = 0
        self._signals = 0
        self._drain_ends: float | None = None
        self._error: BaseException | None = None
        self._suspended = False
        self._swept_at = float("-inf")
        self._trouble = 0
        self._served = False

    # The loop

    def work(self, burst: bool = False, logging_level: str | None = None, **_: Any) -> bool:  # type: ignore[override]
        """Serve until told to stop or, in a burst, until the queues are empty.

        Returns:
            whether any job was taken.

        Raises:
            redis.exceptions.ConnectionError: when Redis cannot be reached at the start.
            Exception: what the engine raised when it was made, or when it broke.
        """
        self._engine = self.service.start()
        self._intake = Intake(self._engine, self.model_alias, self.connection)
        self._publisher.start()
        self._install_signal_handlers()
        try:
            self.bootstrap(logging_level)
            self.connection.hset(MODELS_KEY, self.model_alias, self._engine.info.model_dump_json())
            while self._turn(burst):
                self._listen(POLL_SECONDS)
        finally:
            self._shut_down()
        if self._error is not None:
            raise self._error
        return self._served

    def _turn(self, burst: bool) -> bool:
        """Do what is due; returns whether to go on."""
        if self._error is not None or self._signals > 1:
            return False
        if self._signals == 1 and self._drain_ends is None:
            log.info("draining: running jobs have %.0f s to finish", self._drain_timeout)
            self._drain_ends = time.monotonic() + self._drain_timeout
            self.service.submit(Drain())
        self._cancel_overdue()
        try:
            self.beat()
            if self._drain_ends is not None:
                self.show(self._leases, self._suspended)
                return len(self._leases) > 0 and time.monotonic() < self._drain_ends
            self._sweep()
            taken = self._take()
            self.show(self._leases, self._suspended)
        except TROUBLE as error:
            self._trouble += 1
            pause = min(LONGEST_PAUSE, 0.1 * 2**self._trouble) * random.uniform(0.5, 1.5)
            log.warning("Redis does not answer (%s); trying again in %.1f s", error, pause)
            self._listen(pause)
            return True
        self._trouble = 0
        return not (burst and not taken and len(self._leases) == 0)

    def _take(self) -> bool:
        """Claim as many jobs as there are free rows; the others wait where they are safest."""
        room = self._engine.max_rows - sum(claim.rows for claim in self._leases.jobs())
        if room <= 0:
            return False
        claims = self._leases.claim(room)
        self._suspended = claims is None
        for claim in claims or ():
            self._served = True
            prepared: ActiveJob | Reason
            try:
                prepared = self._intake.prepare(claim)
            except TROUBLE:
                prepared = GivenBack()
            if isinstance(prepared, ActiveJob):
                self.service.submit(Admit(prepared))
            else:
                self._traffic.put(Ended(claim, prepared))
        return bool(claims)

    def _sweep(self) -> None:
        if time.monotonic() - self._swept_at < self._leases.seconds / 4:
            return
        for job_id in self._leases.sweep():
            log.warning("the lease of job %s had run out; it is back in its queue", job_id)
        self._swept_at = time.monotonic()

    def _cancel_overdue(self) -> None:
        for claim in self._leases.jobs():
            if claim.overdue:
                sentence = f"the job ran longer than its timeout of {claim.timeout:g} s"
                self.service.submit(Cancel(claim, Failed(sentence)))

    # Messages

    def _listen(self, timeout: float) -> None:
        """Wait for a message, then handle all that are there."""
        with suppress(Empty):
            self._handle(self._mailbox.get(timeout=timeout))
            while True:
                self._handle(self._mailbox.get_nowait())

    def _handle(self, message: MainMessage) -> None:
        match message:
            case Ring():
                pass
            case StopJob(job_id):
                claim = self._leases.get(job_id)
                if claim is None:
                    log.info("told to stop job %s, which is not running here", job_id)
                else:
                    self.service.submit(Cancel(claim, Stopped("the job was stopped on request")))
            case NeedsRQ(claim, ending):
                try:
                    end_through_rq(self, self._leases, claim, ending)
                except TROUBLE as error:
                    log.warning(
                        "Redis does not answer (%s); job %s will run again", error, claim.id
                    )
            case Crashed(error):
                self._error = error

    # Signals

    def _install_signal_handlers(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self.request_stop)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first time: drain. The second time: stop at once."""
        self._signals += 1
        if self._signals > 1:
            self.exit_code = 128 + signum
        self._mailbox.put(Ring())

    def stop(self) -> None:
        """Drain, from any thread."""
        self.request_stop(signal.SIGTERM, None)

    def _shut_down(self) -> None:
        """End both threads and give back what is left."""
        at_once = self._signals > 1
        self.service.submit(Stop())
        if not self.service.join(0.5 if at_once else STOP_SECONDS):
            log.warning("the engine is still busy; leaving it behind")
            self._traffic.put(Close())
        self._publisher.join(0.5 if at_once else STOP_SECONDS)
        if not at_once:
            self._listen(0)
        try:
            self._leases.give_back(self._leases.jobs())
            if self.birth_date is not None:
                self.teardown()  # type: ignore[no-untyped-call]
        except RedisError as error:
            log.warning("Redis does not answer (%s); leases will run out by themselves", error)
        log.info("in all: %s", self.service.counters)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
