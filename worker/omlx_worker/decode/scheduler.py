"""Which row runs next. Knows no engine, no Redis and no threads.

Rows wait until a place in the batch is free, the best level first and the oldest first among
equals. A row that has waited for ``patience`` seconds goes before all others and is not paused
again, so no row waits for ever. When the batch is full and a row of the best level waits, the
youngest row of the lowest level is paused and takes its turn again later. Prompts are read in
chunks with a decode step between any two, so running rows never wait for more than one chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.row import BULK, HIGH, DecodeRow, Stage

PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """Read ``tokens`` more of a row's prompt; ``joins`` with its first chunk."""

    row: DecodeRow
    tokens: int
    joins: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """Take a decoding row out of the batch, then tell `Scheduler.paused`."""

    row: DecodeRow


@dataclass(frozen=True, slots=True)
class Resume:
    """Put a paused row back into the batch, with the cache that was kept."""

    row: DecodeRow


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


Action = Prefill | Pause | Resume | Evict | Decode | Idle


class Scheduler:
    """Chooses the next action; the caller reports what came of it.

    Args:
        max_rows: rows in the batch at the same time.
        chunks: how many prompt tokens to read at a time.
        budget: whether rows fit into memory together.
        patience: seconds after which a waiting row goes before all others.
    """

    def __init__(
        self,
        max_rows: int,
        chunks: ChunkSize,
        budget: MemoryBudget,
        *,
        patience: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_rows = max_rows
        self._chunks = chunks
        self._budget = budget
        self._patience = patience
        self._clock = clock
        self._arrivals = 0
        self._joins = 0
        self._rows: dict[str, DecodeRow] = {}
        self._decode_is_due = False
        self._follows_chunk = False
        self._hurried = False

    def get(self, row_id: str) -> DecodeRow | None:
        return self._rows.get(row_id)

    @property
    def rows(self) -> list[DecodeRow]:
        return list(self._rows.values())

    @property
    def decoding(self) -> list[DecodeRow]:
        """The rows that the next decode step runs."""
        return self._in(Stage.DECODING)

    @property
    def joined(self) -> int:
        """How many rows hold a place in the batch."""
        return sum(row.in_batch for row in self._rows.values())

    @property
    def waiting(self) -> int:
        """How many rows hold none, paused ones included."""
        return len(self._rows) - self.joined

    @property
    def coming(self) -> int:
        """Rows expected to join with one chunk each, one after each step from now on.

        0 while a prompt is read of which more than a chunk is left.
        """
        if not self._follows_chunk:
            return 0
        reading = self._in(Stage.READING)
        if any(self._chunk_of(row) < row.left for row in reading):
            return 0
        return len(reading) + min(self.waiting, self._max_rows - self.joined)

    def add(self, row: DecodeRow) -> None:
        """Let a row wait for its turn."""
        row.arrival, row.left, row.since = self._arrivals, row.length, self._clock()
        self._arrivals += 1
        self._rows[row.row_id] = row

    def remove(self, row: DecodeRow) -> None:
        """Forget a row that has finished or was dropped; an unknown row is ignored."""
        row.stage = Stage.DONE
        if self._rows.get(row.row_id) is row:
            del self._rows[row.row_id]

    def read(self, row: DecodeRow, left: int, seconds: float | None = None) -> None:
        """Report a `Prefill`: how many prompt tokens are left, and how long it took."""
        if seconds is not None:
            self._chunks.read(row.context, self._hurried, row.left - left, seconds)
        row.context += row.left - left
        row.left = left
        if not left:
            row.stage = Stage.DECODING

    def paused(self, row: DecodeRow, kept_bytes: int | None) -> None:
        """Report a `Pause`.

        Args:
            kept_bytes: what the cache takes; None if it is lost and the tokens are read again.
        """
        if kept_bytes is None:
            self._restart(row)
        else:
            row.stage, row.kept_bytes = Stage.PAUSED, kept_bytes

    def next(self) -> Action:
        """What to do now. A row that joins, resumes or loses its cache counts as such at once."""
        decoding = bool(self.decoding)
        self._follows_chunk = self._decode_is_due and decoding
        action = None if self._follows_chunk else self._admit()
        self._decode_is_due = isinstance(action, Prefill)
        return action or (Decode() if decoding else Idle())

    def _in(self, stage: Stage) -> list[DecodeRow]:
        return [row for row in self._rows.values() if row.stage is stage]

    def _admit(self) -> Prefill | Pause | Resume | Evict | None:
        """Work for the best row that does not decode yet, if it has or can be given a place."""
        self._age()
        rows = [row for row in self._rows.values() if row.stage is not Stage.DECODING]
        best = min(rows, key=lambda row: row.rank, default=None)
        if best is None:
            return None
        if best.in_batch:
            return self._bring_in(best)
        if self._has_place_for(best):
            return self._evict_for(best) or self._bring_in(best)
        if best.level == HIGH and (victim := self._victim()):
            victim.since = self._clock()
            return Pause(victim)
        reading = min(self._in(Stage.READING), key=lambda row: row.rank, default=None)
        return None if reading is None else self._bring_in(reading)

    def _has_place_for(self, row: DecodeRow) -> bool:
        """Whether it could join if no paused row kept its cache; alone, any row can."""
        batch = self._batch()
        return not batch or (len(batch) < self._max_rows and self._fits([*batch, row]))

    def _evict_for(self, row: DecodeRow) -> Evict | None:
        """The next paused row whose cache is in the way: the one to resume last goes first."""
        paused = [other for other in self._in(Stage.PAUSED) if other is not row]
        kept = sum(other.kept_bytes for other in paused)
        if not paused or self._fits([*self._batch(), row], beside=kept):
            return None
        victim = max(paused, key=lambda other: other.rank)
        self._restart(victim)
        return Evict(victim)

    def _fits(self, rows: list[DecodeRow], beside: int = 0) -> bool:
        return self._budget.fits([row.size for row in rows], beside)

    def _batch(self) -> list[DecodeRow]:
        return [row for row in self._rows.values() if row.in_batch]

    def _bring_in(self, row: DecodeRow) -> Prefill | Resume:
        joins = not row.in_batch
        if joins:
            self._joins += 1
            row.joined = self._joins
        if row.stage is Stage.PAUSED:
            row.stage, row.kept_bytes = Stage.DECODING, 0
            return Resume(row)
        row.stage = Stage.READING
        self._hurried = any(other.level < BULK for other in self.decoding)
        return Prefill(row, self._chunk_of(row), joins)

    def _chunk_of(self, row: DecodeRow) -> int:
        """Tokens of a row's prompt to read at a time."""
        return self._chunks.chunk(row.context, self._hurried, row.left)

    def _victim(self) -> DecodeRow | None:
        """The bulk row that has decoded for the shortest time."""
        bulk = [row for row in self.decoding if row.level == BULK and not row.aged]
        return max(bulk, key=lambda row: row.joined, default=None)

    def _restart(self, row: DecodeRow) -> None:
        """A row without a cache waits to be read again."""
        row.stage, row.left = Stage.WAITING, row.length
        row.context = row.kept_bytes = 0

    def _age(self) -> None:
        now = self._clock()
        for row in self._rows.values():
            if not row.in_batch and now - row.since >= self._patience:
                row.aged = True
