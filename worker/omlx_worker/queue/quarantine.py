"""Quarantine: suspects of a worker's death run alone, until it is clear which job kills workers.

Nothing says why a worker died: a job that aborts the engine, a prompt that exhausts the memory, a
power cut. The sweep counts the death as a crash of every job that the worker held.

* After the first crash a job runs as before, beside others. Most deaths are not a job's fault, and
  a power cut must not make 64 jobs run one by one.
* From the second crash on, a job is a suspect. Only a worker that holds nothing claims it, and
  claims nothing else for `QUARANTINE_SECONDS`. A job that kills at once then kills alone.
* A job is convicted by its third crash in quarantine, where it was its worker's only job. It fails,
  and ``Retry`` does not apply. One such crash proves little where workers are killed from outside:
  if every fifth run is, one crash convicts 20% of innocent suspects, three convict 0.8%. A job that
  kills within its quarantine costs five workers.
* A job that ends, in whatever way, loses its crashes. Progress does not reset them: a job whose
  cache outgrows the memory makes progress every time.
* After its quarantine a suspect gets company. A crash in company does not count, but doubles the
  next quarantine, until a job that kills late is alone too.

A busy worker that meets a suspect takes no more jobs until it holds none; under load it would never
be empty otherwise. That costs at most the time of its longest job, on one worker: it reserves the
suspect, and other workers pass it over. An idle worker takes a suspect at once.

`claim.lua` implements the rules and the reservations.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from omlx_worker.queue.claim import Claim

SUSPECT_CRASHES = 2
MAX_LONE_CRASHES = 3
QUARANTINE_SECONDS = 30.0


@dataclass(slots=True)
class Quarantine:
    """What a worker remembers between its claims.

    Attributes:
        max_lone_crashes: crashes without other jobs that convict one.
        seconds: length of the first quarantine.
        alone: the job that was claimed alone. It may have company now, or have ended.
        reserved: queue and id of the suspect that waits until this worker holds nothing.
    """

    max_lone_crashes: int = MAX_LONE_CRASHES
    seconds: float = QUARANTINE_SECONDS
    alone: Claim | None = None
    reserved: tuple[str, str] = ("", "")

    def running(self, held: Sequence[Claim]) -> bool:
        """Whether a suspect must stay alone.

        Args:
            held: all jobs of this worker.
        """
        if self.alone is None or not any(job is self.alone for job in held):
            self.alone = None
            return False
        # Anybody can write the hash that holds the count: limit the exponent.
        beyond = max(0, min(self.alone.crashes - SUSPECT_CRASHES, 16))
        return time.monotonic() - self.alone.claimed_at < self.seconds * (1 << beyond)

    def note(self, reserved: tuple[str, str], claimed: Sequence[Claim]) -> None:
        """Note what a claim brought."""
        self.reserved = reserved
        if claimed:
            self.alone = claimed[0] if claimed[0].treatment == "alone" else None
