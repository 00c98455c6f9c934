"""Quarantine: a job whose workers keep dying runs alone, and fails if they die then, too.

Nothing says why a worker died: a job that aborts the engine, a prompt that exhausts the memory, a
power cut. So the sweep counts deaths in each job that the worker held and that had produced no
tokens since it was claimed. A job with new tokens is not a suspect. Most innocent jobs have some
when a worker is killed from outside. A job that kills has none after its second claim, because it
goes on from its stream and dies at the same token. A worker that was only away, asleep or cut off,
takes its death back with the first call that is refused for want of its lease.

From `SUSPECT_DEATHS` on, a job runs alone. Only a worker that holds nothing claims it, and claims
nothing else until the job ends or has had tokens in its stream for `QUARANTINE_SECONDS`. Until it
has tokens it has no company, so every further death is its own. `FATAL_DEATHS` fail it, and
``Retry`` does not apply. One or two lone deaths would prove little where workers are killed from
outside. When a job ends, in whatever way, its count of deaths is deleted.

A busy worker that meets a suspect stops claiming until it holds nothing or another worker has taken
the suspect. Under load it would never be empty otherwise.
"""

from __future__ import annotations

import time

from omlx_worker.queue.claim import Claim

SUSPECT_DEATHS = 2
LONE_DEATHS = 3
FATAL_DEATHS = SUSPECT_DEATHS + LONE_DEATHS
QUARANTINE_SECONDS = 10.0


def in_quarantine(job: Claim) -> bool:
    """Whether its worker must claim no other job."""
    if job.treatment != "alone":
        return False
    return job.produced_at is None or time.monotonic() - job.produced_at < QUARANTINE_SECONDS
