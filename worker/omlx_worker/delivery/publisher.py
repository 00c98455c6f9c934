"""The traffic thread: writes tokens, endings and lease renewals to Redis.

One call takes everything that steps have produced since the last call. If Redis is slow or away,
the calls grow and decoding does not wait, until the `Outbox` is full. Leases are renewed here, also
while the main thread waits for Redis.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty
from typing import TypeVar

from redis.exceptions import RedisError

from omlx_producer.outage import LongCall, Outage, passes
from omlx_producer.wire import End, EndEvent, InvalidRequest, TokensEvent
from omlx_worker.delivery.observers import Observers
from omlx_worker.delivery.outbox import Outbox
from omlx_worker.delivery.response import finished
from omlx_worker.job import ActiveJob
from omlx_worker.messages import (
    Admit,
    Crashed,
    Drop,
    GivenBack,
    Lost,
    MainMailbox,
    Stepped,
    Stop,
    TrafficMailbox,
    TrafficMessage,
)
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.ending import Commit, Ending
from omlx_worker.queue.lease import LeaseTable

log = logging.getLogger("omlx_worker.delivery.publisher")

OTHER_TOKENS = End("failed", "the job's stream holds other tokens than this run's")
UNMADE = "the worker failed to make the job's result ({}); its log says where, please report it"
MOST_REFUSALS = 2
"""How often Redis refuses the same long call, and takes a short one after it, until it fails."""

T = TypeVar("T")


class Publisher:
    """Writes what the decode thread reports.

    Args:
        mailbox: of this thread.
        main: told when this thread cannot go on.
        drop: tells the decode thread of a job to drop.
        observers: told of first tokens, steps and ends.

    Attributes:
        outage: of this thread's calls.
    """

    def __init__(
        self,
        leases: LeaseTable,
        mailbox: TrafficMailbox,
        main: MainMailbox,
        drop: Callable[[Drop], None],
        outbox: Outbox,
        observers: Observers,
    ) -> None:
        self.outage = Outage(log=log)
        self._outbox = outbox
        self._observers = observers
        self._leases = leases
        self._mailbox = mailbox
        self._main = main
        self._drop_rows = drop
        self._jobs: dict[Claim, ActiveJob] = {}
        self._by_row: dict[str, ActiveJob] = {}
        self._closed = False
        self._give_up = threading.Event()
        self._renew_every = leases.seconds / 4
        self._renewed_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="omlx-traffic", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end. After the timeout it no longer retries calls."""
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
        except Exception as error:  # noqa: BLE001 (the main thread raises it)
            if not self._give_up.is_set():
                self._main.put(Crashed(error))

    def _take(self) -> list[TrafficMessage]:
        """The new messages. Waits for one, or until leases are due."""
        messages: list[TrafficMessage] = []
        due = self._renewed_at + self._renew_every - time.monotonic()
        try:
            messages.append(self._mailbox.get(timeout=max(0.0, due)))
            while True:
                messages.append(self._mailbox.get_nowait())
        except Empty:
            return messages

    def _work(self, messages: list[TrafficMessage]) -> None:
        moved: dict[Claim, ActiveJob] = {}
        dropped: list[Drop] = []
        for message in messages:
            match message:
                case Admit(jobs):
                    for job in jobs:
                        self._admit(job)
                case Stepped():
                    moved |= {job.claim: job for job in self._feed(message)}
                case Drop(claim, _):
                    dropped.append(message)
                    moved.pop(claim, None)
                case Stop():
                    self._closed = True
        self._append([(job, self._make(job, job.take_due_event)) for job in moved.values()])
        over = [job for job in moved.values() if job.finished and job.claim in self._jobs]
        made = [(job.claim, self._make(job, partial(finished, job))) for job in over]
        self._finish([(claim, ending) for claim, ending in made if ending])
        self._give_back([drop.claim for drop in dropped if isinstance(drop.reason, GivenBack)])
        self._end(dropped)
        for message in messages:
            if isinstance(message, Stepped):
                self._outbox.remove(message.emissions)
        if time.monotonic() >= self._renewed_at + self._renew_every:
            self._renew()

    def _admit(self, job: ActiveJob) -> None:
        self._jobs[job.claim] = job
        self._by_row.update((row.row_id, job) for row in job.rows)

    def _feed(self, step: Stepped) -> list[ActiveJob]:
        """Take in a step; returns the jobs that it has moved."""
        owned = [(job, each) for each in step.emissions if (job := self._by_row.get(each.row_id))]
        for job, emission in owned:
            if emission.tokens and job.tokens == job.resumed_tokens:
                self._observers.first_token(job, step.at)
            job.feed(emission)
        self._observers.stepped(owned, step.at)
        return [job for job, _ in owned]

    def _make(self, job: ActiveJob, make: Callable[[], T]) -> T | None:
        """Make a job's event or ending. An error fails that job alone."""
        try:
            return make()
        except Exception as error:  # noqa: BLE001 (logged without its text)
            frames = traceback.extract_tb(error.__traceback__)
            places = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
            kind = type(error).__name__
            log.error("cannot make the result of job %s: %s at %s", job.id, kind, places)
            self._fail(job.claim, End("failed", UNMADE.format(kind)))
            return None

    def _append(self, events: Sequence[tuple[ActiveJob, TokensEvent | None]]) -> None:
        """Publish events of jobs, None only checks a lease. Events of one job are in order."""
        events = [(job, event) for job, event in events if job.claim in self._jobs]
        if not events:
            return
        entries = [(job.claim, event) for job, event in events]
        try:
            refused = self._insist(lambda: self._leases.append(entries))
        except LongCall as error:
            if len(events) > 1:
                for entry in events:
                    self._append([entry])
            else:
                self._fail_long(events[0][0].claim, error)
            return
        for job in dict.fromkeys(job for job, _ in events):
            match refused.get(job.id):
                case None:
                    pass
                case "written":
                    self._fail(job.claim, OTHER_TOKENS)
                case int(tokens):
                    self._write_again(job, tokens)
                case status:
                    self._lose(job.claim, status)

    def _write_again(self, job: ActiveJob, tokens: int) -> None:
        """Write the events after these tokens, which Redis has lost, as they were."""
        lost = job.events_after(tokens)
        if lost[0].since != tokens:
            self._fail(job.claim, OTHER_TOKENS)
            return
        log.warning("Redis has lost tokens of job %s; writing them again", job.id)
        self._append([(job, event) for event in lost])

    def _fail(self, claim: Claim, end: End) -> None:
        """Fail a job. The decode thread may be done with it, so the ending starts here."""
        self._drop_rows(Drop(claim, Lost()))
        self._end([Drop(claim, end)])

    def _fail_long(self, claim: Claim, error: LongCall) -> None:
        got = f"Redis does not take what its job writes ({error})"
        remedy = "ask for fewer tokens, choices or log-probabilities"
        self._fail(claim, End.refusing(InvalidRequest("request", got, remedy)))

    def _renew(self) -> None:
        self._renewed_at = time.monotonic()
        held = self._leases.jobs()
        gone = self._insist(lambda: self._leases.renew(held))
        for claim in held:
            if claim.id in gone:
                self._lose(claim, gone[claim.id])

    def _lose(self, claim: Claim, status: str | int) -> None:
        """Drop a job whose lease is gone."""
        self._drop_rows(Drop(claim, Lost()))
        self._leave(claim, "lost", f"the lease is gone, the job is {status}")
        if self._leases.holds(claim):
            self._insist(lambda: self._leases.lose(claim))

    def _end(self, dropped: Sequence[Drop]) -> None:
        endings = []
        for drop in dropped:
            claim = drop.claim
            job = self._jobs.get(claim)
            sent = job.sent if job else claim.streamed
            match drop.reason:
                case End() as end:
                    endings.append((claim, Ending(EndEvent.of(claim.id, sent, end))))
                case GivenBack() | Lost():
                    self._leave(claim, "lost")
        self._finish(endings)

    def _give_back(self, claims: Sequence[Claim]) -> None:
        """Publish all tokens of jobs and put them back, so that the next run resumes.

        That includes jobs that do not publish their tokens as they come.
        """
        jobs = [self._jobs[claim] for claim in claims if claim in self._jobs]
        progress = [(job, event) for job in jobs if (event := self._make(job, job.take_event))]
        self._append(progress)
        if held := [claim for claim in claims if self._leases.holds(claim)]:
            self._insist(lambda: self._leases.give_back(held))
        for claim in held:
            self._leave(claim, "given back")

    def _finish(self, endings: Sequence[tuple[Claim, Ending]]) -> None:
        held = [(claim, ending) for claim, ending in endings if self._leases.holds(claim)]
        try:
            verdicts = self._insist(lambda: self._leases.commit(held)) if held else []
        except LongCall as error:
            if len(held) > 1:
                for each in held:
                    self._finish([each])
            else:
                self._fail_long(held[0][0], error)
            held, verdicts = [], []
        for (claim, ending), verdict in zip(held, verdicts, strict=True):
            if verdict is Commit.BEHIND:
                self._finish_again(claim, ending)
            elif verdict in (Commit.DONE, Commit.RETRIED):
                outcome = "retried" if verdict is Commit.RETRIED else ending.end.state.outcome
                told = ending.event.error if claim in self._jobs else ending.unquoted
                self._leave(claim, outcome, told)
            else:
                self._leave(claim, verdict.name.lower(), "its result is dropped")
        for claim, _ in endings:
            self._leave(claim, "lost")

    def _finish_again(self, claim: Claim, ending: Ending) -> None:
        """Write the tokens that Redis has lost since the last append, then end the job."""
        job = self._jobs[claim]
        self._append([(job, job.events_after(0)[-1])])
        if claim in self._jobs:
            self._finish([(claim, ending)])

    def _leave(self, claim: Claim, outcome: str, error: str = "") -> None:
        """Forget a job. Its first outcome counts."""
        job = self._jobs.pop(claim, None)
        for row in job.rows if job else ():
            # A later claim of the same job has rows with the same ids.
            if self._by_row.get(row.row_id) is job:
                del self._by_row[row.row_id]
        self._observers.ended(claim, job, outcome, error)

    def _insist(self, call: Callable[[], T]) -> T:
        """Repeat a call until Redis answers it.

        Raises:
            LongCall: if Redis refuses this call and takes shorter ones, so that it is no outage.
        """
        refusals = 0
        while True:
            try:
                answer = call()
            except LongCall:
                # An outage ends before this does.
                self._insist(self._leases.renew)
                refusals += 1
                if refusals == MOST_REFUSALS:
                    raise
            except RedisError as error:
                if not passes(error) or self._give_up.is_set():
                    raise
                self._give_up.wait(self.outage.failed(error))
            else:
                self.outage.answered()
                return answer
