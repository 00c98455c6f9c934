"""Which queues to claim from next: the best first, without starving the others.

A steady stream of jobs of high priority would starve the other queues. So a queue that was passed
over for `PATIENCE_SECONDS` gets one job claimed before all others, and that job is not paused for
others. At least one job of each queue is taken every `PATIENCE_SECONDS`, if there is room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omlx_worker.queue.claim import Claim

PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ClaimPlan:
    """The next claim: up to ``limit`` jobs of these queues, the first queue first.

    Attributes:
        overdue: whether the first queue has waited long enough to go before better ones.
    """

    queues: tuple[str, ...]
    limit: int
    overdue: bool = False


class ClaimOrder:
    """Plans claims, and learns from their results.

    Args:
        queues: names, best first.
    """

    def __init__(
        self,
        queues: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queues = tuple(queues)
        self._clock = clock
        self._chance_at = dict.fromkeys(queues, clock())
        # A job that did not fit: its queue, whether it was overdue, and the jobs held then.
        self._blocked: tuple[str, bool, frozenset[str]] | None = None

    @property
    def best(self) -> str:
        """The queue whose jobs may pause others."""
        return self._queues[0]

    @property
    def last(self) -> str:
        """The queue whose jobs may be paused."""
        return self._queues[-1]

    def rank(self, job: Claim) -> int:
        """The place of a held job's queue in the order of claims, 0 for the first."""
        return 0 if job.urgent else self._queues.index(job.queue)

    def plan(
        self, room: int, pausable: int, held: Sequence[Claim], turn: int | None = None
    ) -> ClaimPlan | None:
        """What to claim now, or None.

        Args:
            room: free rows.
            pausable: rows that may be paused for a job of the best queue.
            held: the jobs of this worker.
            turn: the rank up to which a job may be claimed though no row is free; None for none.
        """
        blocked = self._still_blocked(held)
        open_queues = self._queues
        if blocked is not None:
            queue, overdue, _ = blocked
            open_queues = () if overdue else self._queues[: self._queues.index(queue)]
        if not open_queues:
            return None
        late = self._overdue(open_queues)
        if room <= 0:
            if turn is None:
                return ClaimPlan(self._queues[:1], pausable) if pausable > 0 else None
            open_queues, room = open_queues[: turn + 1], 1
        if late is not None:
            others = tuple(queue for queue in open_queues if queue != late)
            return ClaimPlan((late, *others), 1, overdue=True)
        return ClaimPlan(open_queues, room)

    def claimed(self, plan: ClaimPlan, jobs: Sequence[Claim]) -> None:
        """A plan was carried out and brought these jobs."""
        looked_at = len(plan.queues)
        if len(jobs) >= plan.limit:
            looked_at = 1 + max(plan.queues.index(job.queue) for job in jobs)
        had_a_chance = plan.queues[:looked_at]
        self._chance_at.update(dict.fromkeys(had_a_chance, self._clock()))

    def blocked(self, job: Claim, overdue: bool, held: Sequence[Claim]) -> None:
        """A job was given back because it does not fit beside the held ones.

        Its queue and the queues after it wait until a job leaves. Better queues wait only if the
        job was overdue.
        """
        self._blocked = (job.queue, overdue, frozenset(other.execution for other in held))

    def _still_blocked(self, held: Sequence[Claim]) -> tuple[str, bool, frozenset[str]] | None:
        if self._blocked and not self._blocked[2] <= {job.execution for job in held}:
            self._blocked = None
        return self._blocked

    def _overdue(self, queues: Sequence[str]) -> str | None:
        """The queue that has waited longest, and too long; the best queue never counts."""
        now = self._clock()
        late = [queue for queue in queues[1:] if now - self._chance_at[queue] >= PATIENCE_SECONDS]
        return min(late, key=lambda queue: self._chance_at[queue], default=None)
