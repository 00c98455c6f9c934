"""Claims jobs as there is room, hands them to the decode thread, and stops them.

A job that does not fit waits in Redis, where it is safe and another worker may take it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from omlx_producer.outage import passes
from omlx_worker.control.intake import Intake
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.delivery.job_log import log_start
from omlx_worker.job import ActiveJob
from omlx_worker.messages import (
    Admit,
    DecodeMessage,
    Drop,
    Failed,
    GivenBack,
    Stopped,
    TrafficMailbox,
)
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.order import ClaimOrder
from omlx_worker.queue.unfit import unfit

log = logging.getLogger("omlx_worker.worker")


class Admission:
    """Runs on the main thread.

    Args:
        max_rows: rows in the batch at the same time.
        submit: sends the decode thread a job to run or to drop.
        traffic: where refused jobs go.

    Attributes:
        suspended: whether RQ has suspended all workers.
        served: whether any job was taken.
    """

    def __init__(
        self,
        leases: LeaseTable,
        order: ClaimOrder,
        intake: Intake,
        budget: MemoryBudget,
        max_rows: int,
        *,
        submit: Callable[[DecodeMessage], None],
        traffic: TrafficMailbox,
    ) -> None:
        self.suspended = False
        self.served = False
        self._leases = leases
        self._order = order
        self._intake = intake
        self._budget = budget
        self._max_rows = max_rows
        self._submit = submit
        self._traffic = traffic
        self._swept_at = float("-inf")

    def stop(self, job_id: str) -> None:
        """Stop a job on request."""
        claim = self._leases.get(job_id)
        if claim is None:
            log.info("told to stop job %s, which does not run here", job_id)
        else:
            self._submit(Drop(claim, Stopped("the job was stopped on request")))

    def give_back(self) -> None:
        """Give back the jobs that run, with all that they have produced."""
        for claim in self._leases.jobs():
            self._submit(Drop(claim, GivenBack()))

    def fail_overdue(self) -> None:
        """Fail the jobs that have used up their time."""
        for claim in self._leases.jobs():
            if sentence := claim.overdue:
                self._submit(Drop(claim, Failed(sentence)))

    def sweep(self) -> None:
        """Put expired leases of other workers back into their queues, if it is time to."""
        if time.monotonic() - self._swept_at < self._leases.seconds / 4:
            return
        for job_id in self._leases.sweep():
            log.warning("the lease of job %s had expired; it is back in its queue", job_id)
        self.postpone_sweep()

    def postpone_sweep(self) -> None:
        """After an outage all workers renew their leases before any of them sweeps."""
        self._swept_at = time.monotonic()

    def take(self) -> bool:
        """Claim as many jobs as there is room for; returns whether there were any."""
        held = self._leases.jobs()
        room = self._max_rows - sum(claim.rows for claim in held)
        bulk = sum(claim.rows for claim in held if self._may_pause(claim))
        planned = self._order.plan(room, bulk + min(room, 0), held)
        if planned is None:
            return False
        claims = self._leases.claim(planned.limit, planned.queues)
        self.suspended = claims is None
        claims = claims or []
        self._order.claimed(planned, claims)
        for index, claim in enumerate(claims):
            self.served = True
            claim.urgent = planned.overdue and claim.queue == planned.queues[0]
            if not self._admit_or_end(claim):
                for later in claims[index:]:
                    self._traffic.put(Drop(later, GivenBack()))
                break
        return bool(claims)

    def _admit_or_end(self, claim: Claim) -> bool:
        """Returns False for a job that does not fit into the memory now."""
        prepared: ActiveJob | Failed | Stopped | GivenBack
        try:
            prepared = self._intake.prepare(claim)
        except RedisError as error:
            if unfit(error):
                raise
            log.warning("the keys of job %s cannot be read: %s", claim.id, error)
            # A key of another type.
            refused = Failed(f"Redis refuses the job's keys: {error}")
            prepared = GivenBack() if passes(error) else refused
        if not isinstance(prepared, ActiveJob):
            self._traffic.put(Drop(claim, prepared))
            return True
        held = [other for other in self._leases.jobs() if other is not claim]
        # Without refused jobs and later ones of the same claim: they have no sizes.
        others = [other for other in held if other.sizes]
        preempts = claim.queue == self._order.best
        staying = [other for other in others if not (preempts and self._may_pause(other))]
        # The others have read their prompts, or will before this job does.
        beside = [(0, longest) for other in staying for _, longest in other.sizes]
        if others and not self._budget.fits([*beside, *claim.sizes]):
            self._order.blocked(claim, claim.urgent, others)
            return False
        log_start(prepared)
        self._submit(Admit(prepared))
        return True

    def _may_pause(self, claim: Claim) -> bool:
        return claim.queue == self._order.last and not claim.urgent
