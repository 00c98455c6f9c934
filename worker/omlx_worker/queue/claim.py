"""A job that this worker has claimed, as claim.lua describes it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Self

from omlx_producer.bulk.row import BatchRow
from omlx_producer.client.outcome import EXPIRED
from omlx_producer.wire import End

MAX_BODY_BYTES = 64 * 2**20
"""The longest payload that is read. The longest prompt fits, with each character as one \\uXXXX."""

Treatment = Literal["run", "alone", "stop", "fail"]


@dataclass(eq=False, slots=True)
class Claim:
    """A job that this worker holds.

    Attributes:
        started_at: seconds since 1970, on the server's clock.
        streamed: tokens that an interrupted run left in the job's stream.
        data: RQ's stored payload, neither decoded nor trusted. Empty if it is too long.
        timeout: seconds that the job may run, None without a limit.
        unsupported: a field of RQ's job hash that no worker here serves; empty without one.
        data_bytes: length of the stored payload.
        deaths: number of workers that died while the job ran and produced nothing.
        treatment: ``run``, run ``alone``, ``stop`` (it was cancelled) or ``fail`` (it kills its
            workers). See `omlx_worker.queue.quarantine`.
        urgent: claimed before better queues because its queue had waited long enough.
        sizes: of its rows that have not ended, the largest that fit in a batch; empty until it is
            ready to run. See `omlx_worker.engine.rows.interface.Size`.
        claimed_at: monotonic seconds.
        produced_at: when its first tokens since then were published; None before.
        choices: that its request asks for, once it is ready to run.
        expires_in: seconds from the claim to the end of the completion window, None without one.
        enqueued_at: seconds since 1970, on the producer's clock; None if unknown.
        row: the row of a batch that it runs; None for other jobs.
        ended: whether observers have been told of its end.
    """

    id: str
    execution: str
    queue: str
    started_at: float
    streamed: int
    data: bytes
    timeout: float | None
    unsupported: str = ""
    data_bytes: int = 0
    deaths: int = 0
    treatment: Treatment = "run"
    urgent: bool = False
    sizes: tuple[tuple[int, ...], ...] = ()
    choices: int = 1
    expires_in: float | None = None
    enqueued_at: float | None = None
    row: BatchRow | None = None
    claimed_at: float = field(default_factory=time.monotonic)
    produced_at: float | None = None
    ended: bool = False

    @classmethod
    def from_reply(cls, fields: list[Any]) -> Self:
        """Parse one job of claim.lua's reply."""
        job_id, execution, queue, started_at, streamed, data, size, timeout, *rest = fields
        unsupported, deaths, treatment, enqueued_at, row = rest
        return cls(
            id=job_id.decode(),
            execution=execution.decode(),
            queue=queue.decode(),
            started_at=float(started_at),
            streamed=streamed,
            data=data,
            data_bytes=size,
            timeout=_seconds(timeout),
            unsupported=unsupported.decode(),
            deaths=deaths,
            treatment=treatment.decode(),
            enqueued_at=_since_1970(enqueued_at),
            row=BatchRow.of_field(row) if row else None,
        )

    @property
    def lease(self) -> tuple[str, str, str]:
        return (self.queue, self.id, self.execution)

    @property
    def priority(self) -> str:
        """The last part of the queue's name."""
        return self.queue.rpartition(":")[2]

    @property
    def model(self) -> str:
        """The model's alias, the middle part of the queue's name."""
        return self.queue.partition(":")[2].rpartition(":")[0]

    @property
    def queued_seconds(self) -> float | None:
        """How long the job waited in its queue."""
        return None if self.enqueued_at is None else max(0.0, self.started_at - self.enqueued_at)

    @property
    def rows(self) -> int:
        """Places in the batch that it takes: one until its sizes are known."""
        return len(self.sizes) or 1

    @property
    def timed_out(self) -> End | None:
        """The end of a job that has used up its time; None if it has not."""
        elapsed = time.monotonic() - self.claimed_at
        if self.timeout is not None and elapsed > self.timeout:
            return End("failed", f"the job ran longer than its timeout of {self.timeout:g} s")
        if self.expires_in is not None and elapsed > self.expires_in:
            return EXPIRED
        return None


def _since_1970(value: bytes) -> float | None:
    """A date as RQ writes one; None for anything else."""
    try:
        return datetime.fromisoformat(value.decode()).timestamp()
    except (ValueError, OverflowError):
        return None


def _seconds(value: bytes) -> float | None:
    """A job's timeout in seconds; None for RQ's -1 and for anything unreadable."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if seconds > 0 else None
