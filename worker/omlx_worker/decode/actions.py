"""What the scheduler asks of the engine; one record for each kind of action."""

from __future__ import annotations

from dataclasses import dataclass

from omlx_worker.decode.row import DecodeRow


@dataclass(frozen=True, slots=True)
class Join:
    """Take a row in, then tell `Scheduler.took` what the prefix cache holds of its prompt.

    Attributes:
        room: bytes that the prefix cache may take beside it.
    """

    row: DecodeRow
    room: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Read more of some rows' prompts in one forward, then tell `Scheduler.read`.

    Attributes:
        tokens: how many of each row.
    """

    tokens: dict[DecodeRow, int]

    @property
    def rows(self) -> list[DecodeRow]:
        return list(self.tokens)

    @property
    def computed(self) -> int:
        """Tokens of the forward, padding included."""
        return len(self.tokens) * max(self.tokens.values())

    @property
    def padding(self) -> int:
        return self.computed - sum(self.tokens.values())


@dataclass(frozen=True, slots=True)
class Pause:
    """Take a decoding row out of the batch, then tell `Scheduler.paused`."""

    row: DecodeRow


@dataclass(frozen=True, slots=True)
class Resume:
    """Put a paused row back into the batch, with the cache that was kept.

    Attributes:
        room: bytes that the prefix cache may take beside it.
    """

    row: DecodeRow
    room: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Free the cache of a paused row; its tokens are read again when its turn comes."""

    row: DecodeRow


@dataclass(frozen=True, slots=True)
class Decode:
    """Run one step for all rows whose prompts are read."""


@dataclass(frozen=True, slots=True)
class Idle:
    """There is nothing to do."""


Action = Join | Prefill | Pause | Resume | Evict | Decode | Idle
