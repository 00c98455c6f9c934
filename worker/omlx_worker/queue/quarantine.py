"""Which job kills its worker, and which only stood beside it: suspects run alone.

Nothing tells why a worker died: a job that makes the engine abort, a prompt that takes the last of
the memory, a power cut. The sweep counts the death for every job that the worker held.

* After the first death jobs run as before, in company: most deaths are no job's doing, and a power
  cut must not make 64 jobs run one after the other.
* From the second on a job is a suspect. It is claimed by a worker that holds nothing, and for
  `PROBATION_SECONDS` nothing else is claimed beside it. What kills at once, kills alone.
* A job is convicted when it was alone at the last of three or more deaths. It is then failed,
  and ``Retry`` does not apply.
* A job that ends, in whatever way, has its deaths forgotten. Progress forgets none: a job whose
  cache outgrows the memory makes progress every time. And a job that has outlived its probation
  gets company, in which no death convicts it, but each makes the next probation twice as long,
  until what kills late is alone at last too.

A busy worker that comes upon a suspect takes nothing more until its jobs are over, for under load
it would never hold nothing. That costs at most the time of its longest job, on one worker: the
suspect is reserved, and the others pass it over. An idle worker takes it at once.

`claim.lua` carries out the rules; see there for reservations.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from omlx_worker.queue.claim import ClaimedJob

# In RQ's job hash; the scripts write them.
RUN_FIELDS = ("omlx_crashes", "omlx_alone")
SUSPECT_CRASHES = 2
MAX_CRASHES = 3
PROBATION_SECONDS = 30.0


@dataclass(slots=True)
class Trial:
    """What one worker has to remember between its claims.

    Attributes:
        max_crashes: deaths that convict a job that was alone at the last of them.
        alone: the job that was claimed alone; it may have got company or have ended since.
        reserved: queue and id of the suspect that waits until this worker holds nothing.
    """

    max_crashes: int = MAX_CRASHES
    seconds: float = PROBATION_SECONDS
    alone: ClaimedJob | None = None
    reserved: tuple[str, str] = ("", "")

    @property
    def suspect_crashes(self) -> int:
        return min(SUSPECT_CRASHES, self.max_crashes - 1)

    def running(self, held: Sequence[ClaimedJob]) -> bool:
        """Whether a suspect must still be kept alone.

        Args:
            held: all jobs of this worker.
        """
        if self.alone is None or not any(job is self.alone for job in held):
            self.alone = None
            return False
        # The count is in a hash that anybody can write: no power of a billion.
        beyond = max(0, min(self.alone.crashes - self.suspect_crashes, 16))
        return time.monotonic() - self.alone.claimed_at < self.seconds * (1 << beyond)

    def note(self, reserved: tuple[str, str], claimed: Sequence[ClaimedJob]) -> None:
        """Remember what a claim has brought."""
        self.reserved = reserved
        if claimed:
            self.alone = claimed[0] if claimed[0].treatment == "alone" else None
