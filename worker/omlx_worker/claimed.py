"""A job that a worker has claimed: what claim.lua says about it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(eq=False, slots=True)
class ClaimedJob:
    """A job that this worker holds.

    Attributes:
        queue: the queue that it came from and would go back to.
        started_at: seconds since 1970, on the server's clock.
        streamed: tokens that an interrupted run left in the job's stream.
        data: RQ's payload, as stored: not trusted, not yet decoded.
        timeout: seconds that it may take, None without a limit.
        needs_rq: it has callbacks, retries, repeats or webhooks, which RQ's own handlers serve.
        rows: how many rows of the batch it takes, once that is known.
        claimed_at: on this process's monotonic clock.
    """

    id: str
    execution: str
    queue: str
    started_at: float
    streamed: int
    data: bytes
    timeout: float | None
    needs_rq: bool
    rows: int = 1
    claimed_at: float = field(default_factory=time.monotonic)

    @classmethod
    def from_reply(cls, fields: list[Any]) -> Self:
        """Read one entry of claim.lua's answer."""
        job_id, execution, queue, started_at, streamed, data, timeout, needs_rq = fields
        return cls(
            id=job_id.decode(),
            execution=execution.decode(),
            queue=queue.decode(),
            started_at=float(started_at),
            streamed=streamed,
            data=data,
            timeout=_seconds(timeout),
            needs_rq=bool(needs_rq),
        )

    @property
    def lease(self) -> tuple[str, str, str]:
        return (self.queue, self.id, self.execution)

    @property
    def overdue(self) -> bool:
        return self.timeout is not None and time.monotonic() - self.claimed_at > self.timeout


def _seconds(value: bytes) -> float | None:
    """A job's timeout; RQ writes -1 for none, and what cannot be read limits nothing."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if seconds > 0 else None
