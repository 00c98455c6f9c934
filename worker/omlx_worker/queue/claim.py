"""A job that a worker has claimed: what claim.lua says about it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal, Self

MAX_BODY_BYTES = 64 * 2**20
"""The longest payload that is read. The longest prompt fits, each character as \\uXXXX."""

Size = tuple[int, int]
"""Of a row: the tokens that are yet to be read, and those that it may come to in the end."""

Treatment = Literal["run", "alone", "stop", "fail"]


@dataclass(eq=False, slots=True)
class ClaimedJob:
    """A job that this worker holds.

    Attributes:
        queue: the queue that it came from and would go back to.
        started_at: seconds since 1970, on the server's clock.
        streamed: tokens that an interrupted run left in the job's stream.
        data: RQ's payload, as stored: not trusted, not yet decoded. Empty where it is too long.
        timeout: seconds that it may take, None without a limit.
        needs_rq: it has callbacks, retries, repeats or webhooks, which RQ's own handlers serve.
        data_bytes: how long the stored payload is.
        crashes: how many workers have died while they held it.
        treatment: run it, run it ``alone``, or do not: ``stop`` one that was cancelled, ``fail``
            one that kills its workers. See `omlx_worker.queue.quarantine`.
        urgent: it was claimed before better ones because its queue had waited long enough.
        sizes: of its rows, once they are known; see `omlx_worker.decode.budget`.
        claimed_at: on this process's monotonic clock.
        expires_in: seconds after its claim when its completion window closes, None without one.
    """

    id: str
    execution: str
    queue: str
    started_at: float
    streamed: int
    data: bytes
    timeout: float | None
    needs_rq: bool
    data_bytes: int = 0
    crashes: int = 0
    treatment: Treatment = "run"
    urgent: bool = False
    sizes: tuple[Size, ...] = ()
    expires_in: float | None = None
    claimed_at: float = field(default_factory=time.monotonic)

    @classmethod
    def from_reply(cls, fields: list[Any]) -> Self:
        """Read one entry of claim.lua's answer."""
        job_id, execution, queue, started_at, streamed, data, size, timeout, *rest = fields
        needs_rq, crashes, treatment = rest
        return cls(
            id=job_id.decode(),
            execution=execution.decode(),
            queue=queue.decode(),
            started_at=float(started_at),
            streamed=streamed,
            data=data,
            data_bytes=size,
            timeout=_seconds(timeout),
            needs_rq=bool(needs_rq),
            crashes=crashes,
            treatment=treatment.decode(),
        )

    @property
    def lease(self) -> tuple[str, str, str]:
        return (self.queue, self.id, self.execution)

    @property
    def priority(self) -> str:
        """The last part of the queue's name."""
        return self.queue.rpartition(":")[2]

    @property
    def rows(self) -> int:
        """How many rows of the batch it takes; one until that is known."""
        return len(self.sizes) or 1

    @property
    def overdue(self) -> str | None:
        """Why it may not go on, in one sentence; None while it may."""
        elapsed = time.monotonic() - self.claimed_at
        if self.timeout is not None and elapsed > self.timeout:
            return f"the job ran longer than its timeout of {self.timeout:g} s"
        if self.expires_in is not None and elapsed > self.expires_in:
            return "the job was not finished within its completion_window; give it a longer one"
        return None


def _seconds(value: bytes) -> float | None:
    """A job's timeout; RQ writes -1 for none, and what cannot be read limits nothing."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if seconds > 0 else None
