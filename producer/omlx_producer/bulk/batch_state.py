"""A detached batch at one moment: its state and its counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omlx_producer.protocol import Priority

OVER = ("done", "cancelled")
USAGE = (
    *("prompt_tokens", "cached_tokens", "completion_tokens", "drafted", "accepted"),
    "cut_by_length",
)


@dataclass(frozen=True)
class BatchState:
    """A batch at one moment.

    Attributes:
        state: uploading, open, cancelling, cancelled or done.
        failures: failed rows by code.
        cut_by_length: rows of which a choice ended at its limit of tokens.
    """

    id: str
    state: str
    rows: int
    ok: int
    failures: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted: int
    accepted: int
    cut_by_length: int
    priority: Priority
    window: int
    job_timeout: int
    created_at: float
    ended_at: float | None

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def over(self) -> bool:
        return self.state in OVER

    @classmethod
    def of(cls, batch_id: str, fields: Mapping[str, str]) -> BatchState:
        """Read the fields of its hash in Redis.

        Raises:
            KeyError, ValueError: if a field is missing or broken.
        """

        def number(name: str) -> int:
            return int(fields.get(name, 0))

        priority: Any = fields["priority"]
        usage: dict[str, Any] = {name: number(name) for name in USAGE}
        return cls(
            id=batch_id,
            state=fields["state"],
            rows=number("rows"),
            ok=number("ok"),
            failures={
                name.removeprefix("failed:"): int(value)
                for name, value in sorted(fields.items())
                if name.startswith("failed:")
            },
            **usage,
            priority=priority,
            window=number("window"),
            job_timeout=number("job_timeout"),
            created_at=float(fields["created_at"]),
            ended_at=float(fields["ended_at"]) if "ended_at" in fields else None,
        )
