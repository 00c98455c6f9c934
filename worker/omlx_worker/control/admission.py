"""Claims jobs as there is room, and hands them to the decode thread.

A job that does not fit waits in Redis, where it is safe and another worker may take it.
"""

from __future__ import annotations

from collections.abc import Callable

from redis.exceptions import RedisError

from omlx_producer.outage import passes
from omlx_worker.control.intake import Intake
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.job import ActiveJob
from omlx_worker.messages import GivenBack, Reason
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.order import ClaimOrder


class Admission:
    """Runs on the main thread.

    Args:
        max_rows: rows in the batch at the same time.
        admit: takes an admitted job.
        end: takes a refused job and the reason.

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
        admit: Callable[[ActiveJob], None],
        end: Callable[[Claim, Reason], None],
    ) -> None:
        self.suspended = False
        self.served = False
        self._leases = leases
        self._order = order
        self._intake = intake
        self._budget = budget
        self._max_rows = max_rows
        self._admit = admit
        self._end = end

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
                    self._end(later, GivenBack())
                break
        return bool(claims)

    def _admit_or_end(self, claim: Claim) -> bool:
        """Returns False for a job that does not fit into the memory now."""
        prepared: ActiveJob | Reason
        try:
            prepared = self._intake.prepare(claim)
        except RedisError as error:
            if not passes(error):
                raise
            prepared = GivenBack()
        if not isinstance(prepared, ActiveJob):
            self._end(claim, prepared)
            return True
        # Without later jobs of the same claim, which have no sizes yet.
        others = [other for other in self._leases.jobs() if other.sizes and other is not claim]
        preempts = claim.queue == self._order.best
        staying = [other for other in others if not (preempts and self._may_pause(other))]
        # The others have read their prompts, or will before this job does.
        beside = [(0, longest) for other in staying for _, longest in other.sizes]
        if others and not self._budget.fits([*beside, *claim.sizes]):
            self._order.blocked(claim, claim.urgent, others)
            return False
        self._admit(prepared)
        return True

    def _may_pause(self, claim: Claim) -> bool:
        return claim.queue == self._order.last and not claim.urgent
