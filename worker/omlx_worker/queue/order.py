"""Which queues to claim from next: the best first, and none left waiting for ever.

Under a steady stream of jobs of high priority the queues behind would never be reached. So a
queue that has had no chance for ``patience`` seconds gets one job claimed before all others, and
that job is not paused for others either: at least one job of each queue is taken every
``patience`` seconds, as soon as there is a place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omlx_worker.queue.claim import ClaimedJob


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim to make: up to ``limit`` jobs of these queues, the first queue first.

    Attributes:
        overdue: whether the first queue has waited long enough to go before better ones.
    """

    queues: tuple[str, ...]
    limit: int
    overdue: bool = False


class ClaimOrder:
    """Plans claims, and learns from what they brought.

    Args:
        queues: names, best first.
        patience: seconds.
    """

    def __init__(
        self,
        queues: Sequence[str],
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queues = tuple(queues)
        self._patience = patience
        self._clock = clock
        self._chance_at = dict.fromkeys(queues, clock())
        # A job that did not fit: its queue, whether it was overdue, and who was in its way.
        self._blocked: tuple[str, bool, frozenset[str]] | None = None

    @property
    def best(self) -> str:
        """The queue whose jobs make others wait."""
        return self._queues[0]

    @property
    def last(self) -> str:
        """The queue whose jobs make place for the best."""
        return self._queues[-1]

    def plan(self, room: int, pausable: int, held: Sequence[ClaimedJob]) -> Claim | None:
        """What to claim now, or None.

        Args:
            room: rows that are free.
            pausable: rows that would make place for a job of the best queue.
            held: the jobs in the worker.
        """
        blocked = self._still_blocked(held)
        open_queues = self._queues
        if blocked is not None:
            queue, overdue, _ = blocked
            open_queues = () if overdue else self._queues[: self._queues.index(queue)]
        if room <= 0:
            best = self._queues[:1]
            return Claim(best, pausable) if pausable > 0 and open_queues else None
        if not open_queues:
            return None
        late = self._overdue(open_queues)
        if late is not None:
            others = tuple(queue for queue in open_queues if queue != late)
            return Claim((late, *others), 1, overdue=True)
        return Claim(open_queues, room)

    def claimed(self, claim: Claim, jobs: Sequence[ClaimedJob]) -> None:
        """A claim has been made and brought these jobs."""
        looked_at = len(claim.queues)
        if len(jobs) >= claim.limit:
            looked_at = 1 + max(claim.queues.index(job.queue) for job in jobs)
        had_a_chance = claim.queues[:looked_at]
        self._chance_at.update(dict.fromkeys(had_a_chance, self._clock()))

    def blocked(self, job: ClaimedJob, overdue: bool, held: Sequence[ClaimedJob]) -> None:
        """A job was given back because it does not fit beside what is held.

        Its queue, and those behind it, wait until a job leaves; better queues do not, unless the
        job was overdue: then everything waits for it.
        """
        self._blocked = (job.queue, overdue, frozenset(other.execution for other in held))

    def _still_blocked(self, held: Sequence[ClaimedJob]) -> tuple[str, bool, frozenset[str]] | None:
        if self._blocked and not self._blocked[2] <= {job.execution for job in held}:
            self._blocked = None
        return self._blocked

    def _overdue(self, queues: Sequence[str]) -> str | None:
        """Of the queues that are, the one that has waited longest; the best one never is."""
        now = self._clock()
        late = [queue for queue in queues[1:] if now - self._chance_at[queue] >= self._patience]
        return min(late, key=lambda queue: self._chance_at[queue], default=None)
