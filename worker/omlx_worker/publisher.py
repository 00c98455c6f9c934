"""The traffic thread: tokens, endings and lease renewals, all to Redis, none on the decode thread.

Whatever steps have produced since the last call goes out in one call: when Redis is slow the
calls grow, decoding does not wait. Leases are renewed here and not on the main thread because that
one may be busy for seconds with a long prompt or a callback.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from queue import Empty
from typing import TypeVar

from redis.exceptions import (
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from omlx_producer.protocol import CancelledEvent, FailedEvent
from omlx_worker.active import ActiveJob
from omlx_worker.claimed import ClaimedJob
from omlx_worker.lease import Commit, Ending, LeaseTable
from omlx_worker.messages import (
    Admit,
    Cancel,
    Close,
    Crashed,
    Ended,
    Failed,
    GivenBack,
    Lost,
    MainMailbox,
    NeedsRQ,
    Reason,
    Stepped,
    Stopped,
    TrafficMailbox,
    TrafficMessage,
)

log = logging.getLogger("omlx_worker.publisher")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
# Errors that pass: the same call may succeed later.
TROUBLE = (ConnectionError, TimeoutError, OutOfMemoryError, ReadOnlyError)

T = TypeVar("T")


class Publisher:
    """Writes what the decode thread reports.

    Args:
        mailbox: what it reads.
        main: where jobs go that RQ's own handlers must end.
        cancel: tells the decode thread to drop a job.
    """

    def __init__(
        self,
        leases: LeaseTable,
        mailbox: TrafficMailbox,
        main: MainMailbox,
        cancel: Callable[[Cancel], None],
    ) -> None:
        self._leases = leases
        self._mailbox = mailbox
        self._main = main
        self._cancel = cancel
        self._jobs: dict[str, ActiveJob] = {}
        self._by_row: dict[str, ActiveJob] = {}
        self._closed = False
        self._give_up = threading.Event()
        self._renew_every = leases.seconds / 4
        self._renewed_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="omlx-traffic", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; after the timeout it stops trying to reach Redis."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._give_up.set()
            self._thread.join(1.0)
        return not self._thread.is_alive()

    # The traffic thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._work(self._take())
        except Exception as error:
            if not self._give_up.is_set():
                log.exception("the traffic thread ends")
                self._main.put(Crashed(error))

    def _take(self) -> list[TrafficMessage]:
        """What has come since the last call; waits until something does or leases are due."""
        messages: list[TrafficMessage] = []
        due = self._renewed_at + self._renew_every - time.monotonic()
        try:
            messages.append(self._mailbox.get(timeout=max(0.0, due)))
            while True:
                messages.append(self._mailbox.get_nowait())
        except Empty:
            return messages

    def _work(self, messages: list[TrafficMessage]) -> None:
        moved: dict[str, ActiveJob] = {}
        ended: list[Ended] = []
        for message in messages:
            match message:
                case Admit(job):
                    self._admit(job)
                case Stepped(emissions):
                    for emission in emissions:
                        if owner := self._by_row.get(emission.row_id):
                            owner.feed(emission)
                            moved[owner.id] = owner
                case Ended(claim, _):
                    ended.append(message)
                    moved.pop(claim.id, None)
                case Close():
                    self._closed = True
        self._append(list(moved.values()))
        for job in moved.values():
            if job.finished and self._jobs.get(job.id) is job:
                self._finish(job.claim, job.ending())
        self._give_back([end.claim for end in ended if isinstance(end.reason, GivenBack)])
        for end in ended:
            self._end(end.claim, end.reason)
        if time.monotonic() >= self._renewed_at + self._renew_every:
            self._renew()

    def _admit(self, job: ActiveJob) -> None:
        self._jobs[job.id] = job
        self._by_row.update((row.row_id, job) for row in job.rows)

    def _append(self, jobs: list[ActiveJob]) -> None:
        if not jobs:
            return
        # Jobs that do not stream are only asked about, so that a cancelled one stops at once.
        events = [(job.claim, job.take_event() if job.streams else None) for job in jobs]
        refused = self._insist(lambda: self._leases.append(events))
        for job in jobs:
            match refused.get(job.id):
                case None:
                    pass
                case "written":
                    sentence = "the job's stream holds later tokens than this run has produced"
                    self._cancel(Cancel(job.claim, Failed(sentence)))
                    self._drop(job.claim)
                case status:
                    self._lose(job.claim, status)

    def _renew(self) -> None:
        self._renewed_at = time.monotonic()
        held = self._leases.jobs()
        gone = self._insist(lambda: self._leases.renew(held))
        for claim in held:
            if claim.id in gone:
                self._lose(claim, gone[claim.id])

    def _lose(self, claim: ClaimedJob, status: str) -> None:
        """Drop a job that is no longer this worker's."""
        event = CancelledEvent(
            job_id=claim.id, n=self._sent(claim), error="the job was cancelled while it ran"
        )
        self._cancel(Cancel(claim, Lost()))
        self._drop(claim)
        if not self._leases.holds(claim):
            return
        log.warning("job %s is no longer this worker's (%s); dropping it", claim.id, status)
        if status == "canceled":
            self._insist(lambda: self._tell_cancelled(claim, event))
        self._leases.forget(claim)

    def _tell_cancelled(self, claim: ClaimedJob, event: CancelledEvent) -> None:
        with self._leases.connection.pipeline() as pipeline:
            self._leases.publish_end(pipeline, claim.id, event)
            pipeline.execute(raise_on_error=False)

    def _end(self, claim: ClaimedJob, reason: Reason) -> None:
        n = self._sent(claim)
        match reason:
            case Failed(sentence, retry):
                log.warning("job %s failed: %s", claim.id, sentence)
                failed = FailedEvent(job_id=claim.id, n=n, error=sentence)
                self._finish(claim, Ending("failed", failed, retry=retry))
            case Stopped(sentence):
                cancelled = CancelledEvent(job_id=claim.id, n=n, error=sentence)
                self._finish(claim, Ending("stopped", cancelled))
            case GivenBack() | Lost():
                self._drop(claim)

    def _give_back(self, claims: list[ClaimedJob]) -> None:
        held = [claim for claim in claims if self._leases.holds(claim)]
        if held:
            self._insist(lambda: self._leases.give_back(held))

    def _finish(self, claim: ClaimedJob, ending: Ending) -> None:
        self._drop(claim)
        if not self._leases.holds(claim):
            return
        try:
            verdict = self._insist(lambda: self._leases.commit(claim, ending))
        except ResponseError:
            # Something about this one job's keys; its lease will run out.
            self._leases.forget(claim)
            return
        if verdict is Commit.NEEDS_RQ:
            self._main.put(NeedsRQ(claim, ending))
        elif verdict is Commit.LOST:
            log.warning("job %s is no longer this worker's; its result is dropped", claim.id)

    def _sent(self, claim: ClaimedJob) -> int:
        job = self._jobs.get(claim.id)
        return job.sent if job is not None and job.claim is claim else claim.streamed

    def _drop(self, claim: ClaimedJob) -> None:
        job = self._jobs.get(claim.id)
        if job is not None and job.claim is claim:
            del self._jobs[claim.id]
            for row in job.rows:
                self._by_row.pop(row.row_id, None)

    def _insist(self, call: Callable[[], T]) -> T:
        """Repeat a call until Redis answers it."""
        pause = FIRST_PAUSE
        while True:
            try:
                return call()
            except TROUBLE as error:
                if self._give_up.is_set():
                    raise
                log.warning("Redis does not answer (%s); trying again in %.2f s", error, pause)
                self._give_up.wait(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, LONGEST_PAUSE)
            except RedisError:
                log.exception("Redis refuses a call")
                raise
