"""Claims jobs as there is room, has them prepared, hands them to the decode thread, and stops them.

A job that does not fit waits in Redis, where it is safe and another worker may take it. Jobs of one
queue are let in in the order of their claims, however long each takes to prepare.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from omlx_worker.control.intake import Intake
from omlx_worker.control.preparers import Preparers
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.delivery.observers import Observers
from omlx_worker.engine.rows.interface import Engine
from omlx_worker.job import ActiveJob
from omlx_worker.messages import (
    STOPPED,
    Admit,
    DecodeMessage,
    Drop,
    GivenBack,
    MainMailbox,
    Prepared,
    Readiness,
    Reason,
    TrafficMailbox,
)
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.order import ClaimOrder, ClaimPlan

log = logging.getLogger("omlx_worker.worker")

MOST_COMING = 32
"""Jobs of one claim at most, and jobs of other queues than the best in preparation together."""

GATHER_SECONDS = 0.02
"""How long after its claim a job that is ready waits for others of its queue that are not."""


class Admission:
    """Runs on the main thread.

    Args:
        alias: of the model that the engine has.
        main: the mailbox that gets a `Prepared` for each job; give it to `prepared`.
        submit: sends the decode thread a job to run or to drop.
        traffic: where refused jobs go.
        observers: told of claims and starts.

    Attributes:
        paused: whether RQ has suspended all workers, or an operator has paused this model.
    """

    def __init__(
        self,
        leases: LeaseTable,
        engine: Engine,
        budget: MemoryBudget,
        *,
        alias: str,
        main: MainMailbox,
        submit: Callable[[DecodeMessage], None],
        traffic: TrafficMailbox,
        observers: Observers,
    ) -> None:
        self.paused = False
        self._leases = leases
        self._order = ClaimOrder(leases.queues)
        intake = Intake(engine, alias, leases.connection, budget.objection)
        self._preparers = Preparers(intake.prepare, leases.holds, main)
        self._budget = budget
        self._most = engine.max_rows
        self._submit = submit
        self._traffic = traffic
        self._observers = observers
        # The jobs that are being prepared, oldest first, with what each has come to.
        self._coming: dict[Claim, Readiness | None] = {}

    def stop(self, job_id: str) -> None:
        """Stop a job on request."""
        claim = self._leases.get(job_id)
        if claim is None:
            log.info("told to stop job %s, which does not run here", job_id)
        else:
            self._drop(claim, STOPPED)

    def give_back(self) -> None:
        """Give back the jobs that run, with all that they have produced."""
        self.give_back_coming()
        for claim in self._leases.jobs():
            self._submit(Drop(claim, GivenBack()))

    def close(self) -> None:
        """Prepare no more jobs."""
        self._preparers.close()

    def join(self, seconds: float) -> None:
        """Wait until no job is being prepared, which needs the engine, at most this long."""
        self._preparers.join(seconds)

    def give_back_coming(self, rank: int = 0) -> None:
        """Give back the jobs that are being prepared, of this rank and those after it."""
        # Each goes to the front of its queue, so the first is the last.
        for claim in reversed(list(self._coming)):
            if self._order.rank(claim) >= rank:
                self._drop(claim, GivenBack())

    def fail_timed_out(self) -> None:
        """Fail the jobs that have used up their time."""
        for claim in self._leases.jobs():
            if late := claim.timed_out:
                self._drop(claim, late)

    def prepared(self, message: Prepared) -> None:
        """Note what a job has come to. Those that left in the meantime are ignored."""
        if message.claim in self._coming:
            self._coming[message.claim] = message.outcome

    @property
    def patience(self) -> float | None:
        """Seconds after which `take` is due though nothing has come; None for none."""
        return min(self._gathering().values(), default=None)

    def take(self, most_rows: int, bulk_rows: int) -> bool:
        """Let prepared jobs in and claim others; returns whether any were claimed.

        Args:
            most_rows: no job is claimed while as many rows are held.
            bulk_rows: no job of the last queue is claimed while as many are; at most ``most_rows``.
        """
        self._admit()
        held = self._leases.jobs()
        rows = sum(claim.rows for claim in held)
        room = most_rows - rows
        bulk = sum(claim.rows for claim in held if self._may_pause(claim))
        turn = self._turn(held) if len(held) <= most_rows else None
        planned = self._order.plan(room, bulk + min(room, 0), held, turn)
        if planned is not None and bulk_rows < most_rows and not planned.overdue:
            planned = self._sparing(planned, bulk_rows - rows)
        if planned is not None:
            planned = self._within_bounds(planned)
        if planned is None:
            return False
        claims = self._leases.claim(planned.limit, planned.queues)
        self.paused = claims is None
        claims = claims or []
        self._order.claimed(planned, claims)
        for claim in claims:
            self._observers.claimed(claim)
            claim.urgent = planned.overdue and claim.queue == planned.queues[0]
            self._coming[claim] = None
            self._preparers.submit(claim, self._order.rank(claim))
        return bool(claims)

    def _turn(self, held: Sequence[Claim]) -> int | None:
        """The worst rank of which one more job may be claimed although no row is free: it goes
        before the choices of held jobs that wait.

        None while any held job has produced nothing: another worker may have a place for it.
        """
        if any(claim.produced_at is None for claim in held):
            return None
        return min((self._order.rank(claim) for claim in held if claim.choices > 1), default=None)

    def _sparing(self, planned: ClaimPlan, room: int) -> ClaimPlan | None:
        """Claim no more of the last queue than there is room for."""
        last = self._order.last
        if last not in planned.queues:
            return planned
        if room > 0:
            return replace(planned, limit=min(planned.limit, room))
        others = tuple(queue for queue in planned.queues if queue != last)
        return replace(planned, queues=others) if others else None

    def _within_bounds(self, planned: ClaimPlan) -> ClaimPlan | None:
        """Keep to `MOST_COMING`. When many others are coming, claim from the best queue alone."""
        best = self._order.best
        others = sum(claim.queue != best for claim in self._coming)
        if others <= MOST_COMING // 2:
            return replace(planned, limit=min(planned.limit, MOST_COMING - others))
        room = MOST_COMING - (len(self._coming) - others)
        if room <= 0 or best not in planned.queues:
            return None
        return ClaimPlan((best,), min(planned.limit, room))

    def _gathering(self) -> dict[int, float]:
        """The ranks of which ready jobs wait for others, and for how many seconds more.

        A window of prompts costs much the same however many it holds.
        """
        now, unready, left = time.monotonic(), set[int](), dict[int, float]()
        for claim, outcome in self._coming.items():
            rank = self._order.rank(claim)
            if outcome is None:
                unready.add(rank)
            else:
                left.setdefault(rank, claim.claimed_at + GATHER_SECONDS - now)
        return {rank: left[rank] for rank in unready & left.keys() if left[rank] > 0}

    def _admit(self) -> None:
        """Let in the jobs that are ready, unless an earlier one of their rank is not."""
        unready = set(self._gathering())
        admitted: list[ActiveJob] = []
        try:
            for claim in sorted(self._coming, key=self._order.rank):
                rank, outcome = self._order.rank(claim), self._coming[claim]
                if not self._leases.holds(claim):
                    del self._coming[claim]
                    self._observers.ended(claim)
                elif outcome is None:
                    unready.add(rank)
                elif rank in unready:
                    continue
                elif not isinstance(outcome, ActiveJob):
                    self._drop(claim, outcome)
                elif self._fits(claim, outcome):
                    if claim.streamed and not outcome.sent:
                        self._leases.start_over(claim)
                    del self._coming[claim]
                    self._observers.started(outcome)
                    admitted.append(outcome)
                else:
                    self.give_back_coming(rank)
                    break
        finally:
            if admitted:
                self._submit(Admit(admitted))

    def _fits(self, claim: Claim, job: ActiveJob) -> bool:
        """Whether a job fits into the memory now; then it counts as taking its room."""
        # Jobs that are not let in yet have no sizes.
        others = [other for other in self._leases.jobs() if other.sizes and other is not claim]
        preempts = claim.queue == self._order.best
        staying = [other for other in others if not (preempts and self._may_pause(other))]
        # Of a job of several rows one runs beside this job; the others line up behind it.
        rows = [size for each in staying for size in each.sizes[-1 if each.choices > 1 else 0 :]]
        # They have read their prompts, or will before this job does.
        beside = [(0, longest) for _, longest, *_ in rows]
        # Rows beyond those of a full batch wait in the scheduler for the places of others.
        sizes = tuple(sorted(row.size for row in job.rows)[-self._most :])
        if others and not self._budget.fits([*beside, *sizes]):
            self._order.blocked(claim, claim.urgent, others)
            return False
        claim.sizes, claim.choices = sizes, len(job.rows)
        return True

    def _drop(self, claim: Claim, reason: Reason) -> None:
        if claim in self._coming:
            # The decode thread does not know it.
            del self._coming[claim]
            self._traffic.put(Drop(claim, reason))
        else:
            self._submit(Drop(claim, reason))

    def _may_pause(self, claim: Claim) -> bool:
        return claim.queue == self._order.last and not claim.urgent
