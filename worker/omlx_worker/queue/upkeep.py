"""What one worker does for all that serve its model, while it leads.

It puts back the jobs of dead workers, finds rows that were lost, fails what has waited
longer than its completion window, and removes what has expired. Each call of a script looks at a
bounded number of entries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from omlx_producer.bulk.row import BatchRow
from omlx_producer.client.outcome import EXPIRED
from omlx_producer.lua import load
from omlx_producer.terminal import counted
from omlx_producer.wire import EndEvent
from omlx_producer.wire.keys import EXPIRING_KEY, lead_key, wake_channel
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.ending import Ending
from omlx_worker.queue.lease import EXECUTION_PREFIX, GRACE_SECONDS, LeaseTable, new_claim_id

log = logging.getLogger("omlx_worker.worker")

# Sweeps that a leader may miss before another worker leads.
MISSED_SWEEPS = 3
CLEAN_SECONDS = 600.0
# How long one turn of the main thread may take for this.
TURN_SECONDS = 0.1
# Of one call, which then takes under 2 ms.
MOST_ENTRIES = 100


class Upkeep:
    """Runs on the main thread.

    Args:
        leases: of this worker.
        clock: monotonic seconds.
    """

    def __init__(self, leases: LeaseTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._leases = leases
        self._clock = clock
        self._sweep_at = self._clean_at = float("-inf")
        # The sweep under way.
        self._swept: Iterator[list[str]] = iter(())
        self._name, self._queues = leases.worker_name, leases.queues
        self._lock = lead_key(leases.queues[0])
        self._bell = wake_channel(leases.queues[0].split(":")[1])
        self._pause = leases.seconds / 4
        connection = leases.connection
        self._lead = load(connection, "lead")
        self._sweep = load(connection, "sweep")
        self._mend = load(connection, "mend")
        self._expire = load(connection, "expire")
        self._clean = load(connection, "clean")

    def attend(self) -> None:
        """Do what is due. What is left after `TURN_SECONDS` is done in the next turn."""
        started = self._clock()
        if started >= self._sweep_at:
            self._sweep_at = started + self._pause
            self._swept = self.sweep() if self.lead() else iter(())
        for ids in self._swept:
            for job_id in ids:
                log.warning("the lease of job %s had expired; it is back in its queue", job_id)
            if ids:
                self._leases.connection.publish(self._bell, len(ids))
            if self._clock() - started > TURN_SECONDS:
                return

    def postpone(self) -> None:
        """After an outage all workers renew their leases before any of them sweeps."""
        self._swept = iter(())
        self._sweep_at = self._clock() + self._pause

    def lead(self) -> bool:
        """Become the leader, or stay it; returns whether this worker is."""
        milliseconds = int(1000 * MISSED_SWEEPS * self._pause)
        return bool(self._lead(keys=[self._lock], args=[self._name, milliseconds]))

    def leave(self) -> None:
        """Let another worker lead at once."""
        self._lead(keys=[self._lock], args=[self._name, 0])

    def sweep(self) -> Iterator[list[str]]:
        """Put jobs with expired leases back at the front of their queues, mend the rows of batches,
        and remove what has expired.

        Yields:
            The ids of the jobs that each call put back.
        """
        # After a long outage this worker's own leases have expired, but it lives.
        self._leases.renew()
        for queue in self._queues:
            yield from self._sweep_queue(queue)
        for queue in self._queues:
            batches: int | None = 0
            while batches is not None:
                batches = self._mend(args=[queue, batches, MOST_ENTRIES])
                yield []
        for expired in self.expire():
            if expired:
                log.info("%s had waited longer than the completion window", counted(expired, "job"))
            yield []
        if self._clock() >= self._clean_at:
            for queue in self._queues:
                while self._clean(args=[queue, MOST_ENTRIES]):
                    yield []
            self._clean_at = self._clock() + CLEAN_SECONDS

    def expire(self) -> Iterator[int]:
        """Fail the jobs and rows, of any model, that have waited longer than their windows.

        Yields:
            How many each call has ended.
        """
        leases, more = self._leases, True
        while more:
            args = [self._name, leases.seconds, GRACE_SECONDS, new_claim_id()]
            reply = self._expire(args=[*args, MOST_ENTRIES, str(EXPIRED)])
            started, failed, more = reply
            endings = []
            for job_id, execution, queue, tokens, row in started:
                event = EndEvent.of(job_id.decode(), tokens, EXPIRED)
                lease = (event.job_id, execution.decode(), queue.decode())
                of_batch = BatchRow.of_field(row) if row else None
                claim = Claim(*lease, 0.0, tokens, b"", None, row=of_batch)
                endings.append((claim, Ending(event)))
            if endings:
                leases.commit(endings)
                # One that somebody requeues runs.
                leases.connection.zrem(EXPIRING_KEY, *(claim.id for claim, _ in endings))
            yield len(endings) + failed

    def _sweep_queue(self, queue: str) -> Iterator[list[str]]:
        left, looked = 0, MOST_ENTRIES
        while looked >= MOST_ENTRIES:
            reply = self._sweep(args=[queue, left, MOST_ENTRIES, GRACE_SECONDS, EXECUTION_PREFIX])
            returned, leaves, looked = reply
            left += leaves
            yield _texts(returned)


def _texts(ids: list[bytes]) -> list[str]:
    return [job_id.decode(errors="replace") for job_id in ids]
