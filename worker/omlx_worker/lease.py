"""The lease: which jobs this worker holds, and every way to take, keep, write and end them.

A claimed job is held by one execution, an entry of RQ's started registry. Whatever is written
about the job is written by a script that first checks the entry, so a worker that was paused or
cut off for longer than its lease can write nothing: the sweeper of another worker has removed it.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from redis import Redis
from redis.client import Pipeline
from rq.defaults import DEFAULT_FAILURE_TTL, DEFAULT_RESULT_TTL

from omlx_producer.protocol import TerminalEvent, TokensEvent, events_key, tokens_channel
from omlx_worker.claimed import ClaimedJob
from omlx_worker.scripts import load

# Execution ids of this project begin with it and sort by claim; RQ's own are bare hexadecimal.
EXECUTION_PREFIX = "omlx-"
# How long RQ's own clean-up leaves an expired lease to our sweeper; see `extend` in the prelude.
GRACE_SECONDS = 7 * 86_400
SWEEP_LOCK = "omlx:sweep"
SWEEP_LOCK_MILLISECONDS = 1_000
STREAM_TTL = 86_400


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ends.

    Attributes:
        status: RQ's: finished, failed or stopped.
        event: the terminal event; its error is the result of a job that did not finish.
        result: the response body of a finished job.
        retry: whether RQ's ``Retry`` may apply to a failure.
    """

    status: str
    event: TerminalEvent
    result: dict[str, Any] | None = None
    retry: bool = True

    @property
    def sentence(self) -> str:
        return getattr(self.event, "error", "")

    @property
    def payload(self) -> str:
        """As `rq.results.Result` stores it."""
        if self.status == "finished":
            return b64encode(json.dumps(self.result).encode()).decode()
        return b64encode(zlib.compress(self.sentence.encode())).decode()


class Commit(IntEnum):
    """What became of an ending; the values are commit.lua's."""

    LOST = 0
    DONE = 1
    NEEDS_RQ = 2


class LeaseTable:
    """The leases of one worker. Any thread may call any method.

    Args:
        queues: names, best first.
        on_free: called, on any thread, whenever a job has left the table.
    """

    def __init__(
        self,
        connection: Redis,
        worker_name: str,
        queues: Sequence[str],
        *,
        seconds: float = 30.0,
        stream_ttl: int = STREAM_TTL,
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        self.connection = connection
        self.seconds = seconds
        self._worker_name = worker_name
        self._queues = list(queues)
        self._stream_ttl = stream_ttl
        self._on_free = on_free
        self._lock = threading.Lock()
        self._jobs: dict[str, ClaimedJob] = {}
        self._claim = load(connection, "claim")
        self._append = load(connection, "append")
        self._commit = load(connection, "commit")
        self._renew = load(connection, "renew")
        self._give_back = load(connection, "give_back")
        self._sweep = load(connection, "sweep")

    # The table

    def __len__(self) -> int:
        with self._lock:
            return len(self._jobs)

    def jobs(self) -> list[ClaimedJob]:
        """The jobs held, oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def get(self, job_id: str) -> ClaimedJob | None:
        with self._lock:
            return self._jobs.get(job_id)

    def holds(self, job: ClaimedJob) -> bool:
        """Whether this worker still believes that it holds the job."""
        return self.get(job.id) is job

    def forget(self, job: ClaimedJob) -> None:
        with self._lock:
            if self._jobs.get(job.id) is job:
                del self._jobs[job.id]
        self._on_free()

    # Redis

    def claim(self, limit: int) -> list[ClaimedJob] | None:
        """Take up to ``limit`` jobs, best queue first; None while workers are suspended."""
        claim = f"{EXECUTION_PREFIX}{time.time_ns():016x}{secrets.token_hex(6)}"
        executions = [f"{claim}{number:04x}" for number in range(limit)]
        reply = self._claim(
            keys=self._queues,
            args=[
                limit,
                self._worker_name,
                self.seconds,
                GRACE_SECONDS,
                events_key(""),
                *executions,
            ],
        )
        if reply is None:
            return None
        claimed = [ClaimedJob.from_reply(fields) for fields in reply]
        with self._lock:
            self._jobs.update((job.id, job) for job in claimed)
        return claimed

    def append(self, events: Sequence[tuple[ClaimedJob, TokensEvent | None]]) -> dict[str, str]:
        """Publish one event for each job; None only asks whether the job is still held.

        Returns:
            The jobs refused and why: the status that ended the lease, or ``written`` when the
            stream is further than the event.
        """
        args: list[str | float] = [self._stream_ttl, events_key(""), tokens_channel("")]
        for job, event in events:
            text = event.model_dump_json(exclude_none=True) if event else ""
            args += [*job.lease, event.stream_id if event else "", text]
        return _pairs(self._append(args=args))

    def commit(self, job: ClaimedJob, ending: Ending, *, force: bool = False) -> Commit:
        """End a job, if it is still held, and drop it from the table.

        Args:
            force: end it here even if it has dependents or callbacks that RQ should serve.
        """
        if job.needs_rq and not force:
            return Commit.NEEDS_RQ
        finished = ending.status == "finished"
        verdict = Commit(
            self._commit(
                args=[
                    *job.lease,
                    self._worker_name,
                    ending.status,
                    ending.payload,
                    DEFAULT_RESULT_TTL if finished else DEFAULT_FAILURE_TTL,
                    self._stream_ttl,
                    events_key(job.id),
                    tokens_channel(job.id),
                    ending.event.stream_id,
                    ending.event.model_dump_json(),
                    int(force),
                ]
            )
        )
        if verdict is not Commit.NEEDS_RQ:
            self.forget(job)
        return verdict

    def publish_end(
        self, pipeline: Pipeline, job_id: str, event: TerminalEvent, ttl: int | None = None
    ) -> None:
        """Write the terminal event of a job that ends otherwise than by `commit`.

        Args:
            ttl: seconds that the result is kept, if there is one.
        """
        key, payload = events_key(job_id), event.model_dump_json()
        pipeline.xadd(key, {"event": payload}, id=event.stream_id)
        pipeline.publish(tokens_channel(job_id), payload)
        pipeline.expire(key, ttl if ttl and ttl > 0 else self._stream_ttl)

    def renew(self, jobs: Iterable[ClaimedJob] | None = None) -> dict[str, str]:
        """Renew leases, all by default; returns those that are gone and the jobs' statuses."""
        held = list(jobs) if jobs is not None else self.jobs()
        if not held:
            return {}
        leases = [part for job in held for part in job.lease]
        return _pairs(self._renew(args=[self.seconds, GRACE_SECONDS, *leases]))

    def give_back(self, jobs: Iterable[ClaimedJob]) -> int:
        """Put jobs back at the front of their queues, the oldest in front."""
        held = sorted(jobs, key=lambda job: job.claimed_at, reverse=True)
        if not held:
            return 0
        returned = int(self._give_back(args=[part for job in held for part in job.lease]))
        for job in held:
            self.forget(job)
        return returned

    def sweep(self) -> list[str]:
        """Put expired leases, anybody's, back at the front of their queues."""
        args: list[str | int] = [
            SWEEP_LOCK_MILLISECONDS,
            GRACE_SECONDS,
            EXECUTION_PREFIX,
            *self._queues,
        ]
        lock = f"{SWEEP_LOCK}:{self._queues[0]}"
        return [job.decode() for job in self._sweep(keys=[lock], args=args)]


def _pairs(reply: list[bytes]) -> dict[str, str]:
    texts = [item.decode() for item in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))
