"""The leases of a worker: claim jobs, renew them, publish their tokens, end them, give them back.

One execution, an entry of RQ's started registry, holds a claimed job. Every script that writes
about the job first checks the entry. So a worker that was paused or cut off for longer than its
lease can write nothing: the sweep of another worker has removed the entry.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis import Redis
from redis.client import Pipeline
from rq.job import Job
from rq.registry import StartedJobRegistry

from omlx_producer.lua import load
from omlx_producer.wire import WIRE_VERSION, TokensEvent, events_key
from omlx_worker.queue.cancelled import clear_up
from omlx_worker.queue.claim import MAX_BODY_BYTES, Claim
from omlx_worker.queue.ending import Commit, Ending
from omlx_worker.queue.quarantine import FATAL_DEATHS, SUSPECT_DEATHS, in_quarantine

log = logging.getLogger("omlx_worker.queue.lease")

# The prefix of this project's execution ids, which sort by claim. RQ's are bare hexadecimal.
EXECUTION_PREFIX = "omlx-"
# How long RQ's clean-up leaves an expired lease to our sweep; see `extend` in prelude.lua.
GRACE_SECONDS = 7 * 86_400
STREAM_TTL = 86_400
"""Seconds that a stream without a result is kept."""


def new_claim_id() -> str:
    """A prefix of execution ids that no call has had."""
    return f"{EXECUTION_PREFIX}{time.time_ns():016x}{secrets.token_hex(6)}"


class LeaseTable:
    """The leases of one worker. Any thread may call any method but `claim`.

    Args:
        queues: names, best first.
        on_free: called on any thread after a job has left the table.
        on_stop: called on any thread, once for each job that is to be stopped.
    """

    def __init__(
        self,
        connection: Redis,
        worker_name: str,
        queues: Sequence[str],
        *,
        seconds: float = 30.0,
        on_free: Callable[[], None] = lambda: None,
        on_stop: Callable[[Claim], None] = lambda _: None,
    ) -> None:
        self.connection = connection
        self.seconds = seconds
        self.worker_name = worker_name
        self.queues = list(queues)
        self._on_free = on_free
        self._on_stop = on_stop
        # The queue in which a suspect waits until this worker holds nothing.
        self._suspect_in: str | None = None
        self._lock = threading.Lock()
        self._jobs: dict[str, Claim] = {}
        # A claim without an answer yet. The next call repeats it.
        self._unanswered: str | None = None
        self._wire_version, self._told_newer = WIRE_VERSION, False
        self._claim = load(connection, "claim")
        self._waiting = load(connection, "waiting")
        self._append = load(connection, "append")
        self._commit = load(connection, "commit")
        self._renew = load(connection, "renew")
        self._give_back = load(connection, "give_back")

    # The table

    def __len__(self) -> int:
        with self._lock:
            return len(self._jobs)

    def jobs(self) -> list[Claim]:
        """The jobs held, oldest first."""
        with self._lock:
            return list(self._jobs.values())

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """The sizes of the rows of all ready jobs, as if their prompts were read."""
        return [(0, longest) for claim in self.jobs() for _, longest, *_ in claim.sizes]

    def get(self, job_id: str) -> Claim | None:
        with self._lock:
            return self._jobs.get(job_id)

    def holds(self, job: Claim) -> bool:
        """Whether the job is in the table; Redis may have ended its lease."""
        return self.get(job.id) is job

    def forget(self, job: Claim) -> None:
        with self._lock:
            if self._jobs.get(job.id) is job:
                del self._jobs[job.id]
        self._on_free()

    # Redis

    def claim(self, limit: int, queues: Sequence[str] | None = None) -> list[Claim] | None:
        """Take up to ``limit`` jobs, best queue first; None while paused.

        Takes none while a suspect runs alone here or waits to; see `queue.quarantine`. Only one
        thread may call it.

        Args:
            queues: to take from, best first; all by default.
        """
        held = self.jobs()
        if any(map(in_quarantine, held)):
            return []
        names = list(queues or self.queues)
        if self._suspect_in:
            if self._suspect_in not in names:
                return []
            names.sort(key=lambda name: name != self._suspect_in)
        if self._unanswered is None:
            self._unanswered = new_claim_id()
        reply = self._claim(
            keys=names,
            args=[
                limit,
                self.worker_name,
                self.seconds,
                GRACE_SECONDS,
                MAX_BODY_BYTES,
                SUSPECT_DEATHS,
                FATAL_DEATHS,
                len(held),
                self._unanswered,
                self._wire_version,
            ],
        )
        self._unanswered = None
        if reply is None:
            return None
        suspect_in, entries, newer = reply
        self._tell_newer(newer)
        self._suspect_in = suspect_in.decode() or None
        claimed = [Claim.from_reply(fields) for fields in entries]
        with self._lock:
            self._jobs.update((job.id, job) for job in claimed)
        return claimed

    def waiting(self) -> list[str]:
        """The queues in which something waits that `claim` takes, unless they are paused."""
        queues, newer = self._waiting(keys=self.queues, args=[self._wire_version])
        self._tell_newer(newer)
        return [queue.decode() for queue in queues]

    def _tell_newer(self, newer: bytes) -> None:
        """Tell once of a job or batch that is of a newer version."""
        if newer and not self._told_newer:
            self._told_newer = True
            log.warning(
                "job or batch %s has fields of a newer version of omlx-queue and is left to newer "
                "workers; upgrade this one",
                newer.decode(errors="replace"),
            )

    def start_over(self, job: Claim) -> None:
        """Delete the stream that an earlier run of a job has left, if the lease holds."""

        def delete(pipeline: Pipeline) -> None:
            held = pipeline.zscore(registry.key, f"{job.id}:{job.execution}")
            pipeline.multi()
            if held is not None:
                pipeline.delete(events_key(job.id))

        registry = StartedJobRegistry(job.queue, connection=self.connection)
        # Whoever takes the job away writes to its hash.
        self.connection.transaction(delete, Job.key_for(job.id))

    def append(self, events: Sequence[tuple[Claim, TokensEvent | None]]) -> dict[str, str | int]:
        """Publish events of jobs; None only checks the lease.

        Returns:
            Refused jobs and reasons: the job's status if the lease is gone, ``written`` if the
            stream has other entries, the number of tokens in it if the last ones are lost.
        """
        args: list[str | float] = [STREAM_TTL]
        for job, event in events:
            text = event.model_dump_json(exclude_none=True) if event else ""
            place = (event.since, event.stream_id) if event else ("", "")
            args += [*job.lease, *place, text]
        refused = self._lost(self._append(args=args), [job for job, _ in events])
        for job, event in events:
            if event and job.produced_at is None and job.id not in refused:
                job.produced_at = time.monotonic()
        return refused

    def commit(self, endings: Sequence[tuple[Claim, Ending]]) -> list[Commit]:
        """End jobs whose leases hold, each independently, and drop them from the table.

        A call that raised may be repeated; nothing is done twice. A job that is ``BEHIND``
        stays in the table.
        """
        args: list[str | int | bytes] = [self.worker_name, STREAM_TTL]
        for job, ending in endings:
            args += [*job.lease, *ending.fields(job.row)]
        verdicts = []
        for (job, _), reply in zip(endings, self._commit(args=args), strict=True):
            verdict = Commit.of(reply)
            if verdict is Commit.LOST:
                self.lose(job)
            elif verdict is not Commit.BEHIND:
                self.forget(job)
            verdicts.append(verdict)
        return verdicts

    def lose(self, job: Claim) -> None:
        """Drop a job whose lease is gone."""
        clear_up(self.connection, job, STREAM_TTL)
        self.forget(job)

    def renew(self, jobs: Iterable[Claim] | None = None) -> dict[str, str | int]:
        """Renew leases, all by default; returns the statuses of jobs whose leases are gone."""
        held = list(jobs) if jobs is not None else self.jobs()
        if not held:
            return {}
        leases = [part for job in held for part in job.lease]
        return self._lost(self._renew(args=[self.seconds, GRACE_SECONDS, *leases]), held)

    def give_back(self, jobs: Iterable[Claim]) -> int:
        """Put jobs back at the front of their queues, the oldest first; returns how many.

        Jobs whose leases are gone, such as cancelled ones, are dropped.
        """
        held = sorted(jobs, key=lambda job: job.claimed_at, reverse=True)
        if not held:
            return 0
        args = [part for job in held for part in job.lease]
        replies = self._give_back(args=args)
        for job, returned in zip(held, replies, strict=True):
            if returned:
                self.forget(job)
            else:
                self.lose(job)
        return sum(replies)

    def _lost(self, reply: list[Any], asked: Iterable[Claim]) -> dict[str, str | int]:
        """Parse a reply of append.lua or renew.lua. Passes on jobs to be stopped."""
        # A status may be anything.
        told = {
            job.decode(): reason.decode(errors="replace") if isinstance(reason, bytes) else reason
            for job, reason in zip(reply[::2], reply[1::2], strict=True)
        }
        for job in asked:
            if told.get(job.id) == "stop":
                del told[job.id]
                if job.treatment != "stop":
                    job.treatment = "stop"
                    self._on_stop(job)
        return told
