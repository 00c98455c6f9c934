"""Upkeep of held jobs: stop requests, time limits, endings by RQ, expired leases of others."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from omlx_worker.control.rq_endings import end_through_rq
from omlx_worker.control.rq_record import RecordedWorker
from omlx_worker.messages import Drop, Failed, NeedsRQ, Stopped
from omlx_worker.queue.lease import LeaseTable

log = logging.getLogger("omlx_worker.worker")


class Upkeep:
    """Runs on the main thread.

    Args:
        cancel: sends the decode thread a job to drop.
    """

    def __init__(
        self, worker: RecordedWorker, leases: LeaseTable, cancel: Callable[[Drop], None]
    ) -> None:
        self._worker = worker
        self._leases = leases
        self._cancel = cancel
        self._endings: deque[NeedsRQ] = deque()
        self._swept_at = float("-inf")

    def stop(self, job_id: str) -> None:
        """Stop a job on request."""
        claim = self._leases.get(job_id)
        if claim is None:
            log.info("told to stop job %s, which does not run here", job_id)
        else:
            self._cancel(Drop(claim, Stopped("the job was stopped on request")))

    def fail_overdue(self) -> None:
        """Fail the jobs that have used up their time."""
        for claim in self._leases.jobs():
            if sentence := claim.overdue:
                self._cancel(Drop(claim, Failed(sentence)))

    def add_ending(self, ending: NeedsRQ) -> None:
        """Take an ending that RQ's handlers must write."""
        self._endings.append(ending)

    def write_endings(self) -> None:
        """Write the endings that were added. One that Redis did not take stays for the next call.

        Raises:
            redis.exceptions.RedisError: if Redis does not take an ending.
        """
        while self._endings:
            end_through_rq(
                self._worker, self._leases, self._endings[0].claim, self._endings[0].ending
            )
            self._endings.popleft()

    def sweep(self) -> None:
        """Put expired leases of other workers back into their queues, if it is time to."""
        if time.monotonic() - self._swept_at < self._leases.seconds / 4:
            return
        for job_id in self._leases.sweep():
            log.warning("the lease of job %s had expired; it is back in its queue", job_id)
        self._swept_at = time.monotonic()

    def postpone_sweep(self) -> None:
        """After an outage all workers renew their leases before any of them sweeps."""
        self._swept_at = time.monotonic()
