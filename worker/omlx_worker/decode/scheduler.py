"""Who runs next. Pure Python: knows rows by name and length, no Redis and no MLX.

Rows wait until a place in the batch is free, the best level first and the oldest first among
equals. A row that has waited for long goes before all others and is not paused any more, so
that none waits for ever. When the batch is full and a row of the best level waits, the youngest
row of the lowest level is paused and takes its turn again later. Prompts are read in chunks with a
decode step between any two, so that running rows never wait for more than one chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from omlx_worker.decode.chunk_size import PrefillPace

HIGH, DEFAULT, BULK = 0, 1, 2
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """Read ``tokens`` more of a row's prompt; the row joins the batch with its first chunk."""

    row_id: str
    tokens: int
    joins: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """Take a decoding row out of the batch, then say so to `Scheduler.paused`."""

    row_id: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Put a paused row whose cache was kept back into the batch."""

    row_id: str


@dataclass(frozen=True, slots=True)
class Decode:
    """Run one step for all rows whose prompts are read."""


@dataclass(frozen=True, slots=True)
class Idle:
    """There is nothing to do."""


Action = Prefill | Pause | Resume | Decode | Idle


class _Stage(Enum):
    WAITING = auto()
    READING = auto()
    DECODING = auto()
    PAUSED = auto()

    @property
    def in_batch(self) -> bool:
        return self in (_Stage.READING, _Stage.DECODING)


@dataclass(slots=True)
class _Row:
    """A row; ``since`` is when it began to wait, ``place`` the order in which rows arrived."""

    row_id: str
    level: int
    place: int
    left: int
    since: float
    context: int = 0
    joined: int = 0
    aged: bool = False
    stage: _Stage = _Stage.WAITING

    @property
    def rank(self) -> tuple[int, int]:
        return (HIGH if self.aged else self.level, self.place)


class Scheduler:
    """Chooses the next action; the caller reports what came of it.

    Args:
        max_rows: rows in the batch at the same time.
        pace: how many prompt tokens are read at a time.
        patience: seconds after which a waiting row goes before all others.
        fits: whether the last of these rows can join the others, as far as memory goes; true
            of any row alone.
    """

    def __init__(
        self,
        max_rows: int,
        pace: PrefillPace,
        *,
        patience: float = PATIENCE_SECONDS,
        fits: Callable[[Sequence[str]], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_rows = max_rows
        self._pace = pace
        self._patience = patience
        self._fits = fits
        self._clock = clock
        self._arrivals = 0
        self._joins = 0
        self._rows: dict[str, _Row] = {}
        self._decode_is_due = False
        self._follows_chunk = False
        self._hurried = False

    @property
    def decoding(self) -> int:
        """How many rows the next decode step runs."""
        return sum(row.stage is _Stage.DECODING for row in self._rows.values())

    @property
    def decoding_rows(self) -> list[str]:
        """The rows that the next decode step runs."""
        return [row.row_id for row in self._rows.values() if row.stage is _Stage.DECODING]

    @property
    def joined(self) -> int:
        """How many rows hold a place in the batch."""
        return sum(row.stage.in_batch for row in self._rows.values())

    @property
    def waiting(self) -> int:
        """How many rows hold none, paused ones included."""
        return len(self._rows) - self.joined

    @property
    def coming(self) -> int:
        """Rows that can be expected to join with a chunk each, one after each step from this on.

        None while one reads a prompt of which more than a chunk is left: the longer a step takes,
        the longer are they, and the fewer.
        """
        if not self._follows_chunk:
            return 0
        reading = [row for row in self._rows.values() if row.stage is _Stage.READING]
        if any(self._chunk_of(row) < row.left for row in reading):
            return 0
        return len(reading) + min(self.waiting, self._max_rows - self.joined)

    @property
    def reading(self) -> bool:
        """Whether a prompt is being read between the steps."""
        return any(row.stage is _Stage.READING for row in self._rows.values())

    @property
    def paused_rows(self) -> list[str]:
        """The rows that are paused with their caches kept, the one to resume last first."""
        rows = [row for row in self._rows.values() if row.stage is _Stage.PAUSED]
        return [row.row_id for row in sorted(rows, key=lambda row: row.rank, reverse=True)]

    def add(self, row_id: str, tokens: int, level: int = DEFAULT) -> None:
        """Let a row wait for its turn; a smaller level goes first.

        Args:
            tokens: of its prompt, all of them to be read.
        """
        self._rows[row_id] = _Row(row_id, level, self._arrivals, tokens, self._clock())
        self._arrivals += 1

    def remove(self, row_id: str) -> None:
        """Forget a row that has finished or was dropped; unknown ids are ignored."""
        self._rows.pop(row_id, None)

    def read(self, row_id: str, left: int, seconds: float | None = None) -> None:
        """Report how many prompt tokens of a row are left after a `Prefill`, and what it took."""
        row = self._rows[row_id]
        if seconds is not None:
            self._pace.read(row.context, self._hurried, row.left - left, seconds)
        row.context += row.left - left
        row.left = left
        if not left:
            row.stage = _Stage.DECODING

    def paused(self, row_id: str, kept: bool, tokens: int) -> None:
        """Report what came of a `Pause`, or that the cache of a paused row was let go.

        Args:
            kept: whether `Resume` can put the row back; else its tokens are read again.
            tokens: the row's prompt and all that it has generated.
        """
        row = self._rows[row_id]
        row.stage = _Stage.PAUSED if kept else _Stage.WAITING
        row.left = 0 if kept else tokens
        row.context = tokens if kept else 0

    def is_reading(self, row_id: str) -> bool:
        """Whether a row is in the batch with part of its prompt still to be read."""
        return self._rows[row_id].stage is _Stage.READING

    def has_joined(self, row_id: str) -> bool:
        """Whether a row has a place in the batch, or has had one: the engine knows of it."""
        row = self._rows.get(row_id)
        return row is not None and row.stage is not _Stage.WAITING

    def next(self) -> Action:
        """What to do now. A row that joins, pauses or resumes counts as such from here on."""
        decoding = self.decoding
        self._follows_chunk = self._decode_is_due and decoding > 0
        action = None if self._follows_chunk else self._admit()
        self._decode_is_due = isinstance(action, Prefill)
        return action or (Decode() if decoding else Idle())

    def _admit(self) -> Prefill | Pause | Resume | None:
        """Work for the best row that does not decode yet, if it has or can be given a place."""
        self._age()
        rows = [row for row in self._rows.values() if row.stage is not _Stage.DECODING]
        best = min(rows, key=lambda row: row.rank, default=None)
        if best is None:
            return None
        if not best.stage.in_batch and not self._has_room_for(best):
            if best.level == HIGH and (victim := self._victim()):
                victim.stage, victim.since = _Stage.PAUSED, self._clock()
                return Pause(victim.row_id)
            reading = [row for row in rows if row.stage.in_batch]
            best = min(reading, key=lambda row: row.rank, default=None)
            if best is None:
                return None
        return self._bring_in(best)

    def _has_room_for(self, row: _Row) -> bool:
        batch = [other.row_id for other in self._rows.values() if other.stage.in_batch]
        return len(batch) < self._max_rows and self._fits([*batch, row.row_id])

    def _bring_in(self, row: _Row) -> Prefill | Resume:
        joins = not row.stage.in_batch
        if joins:
            self._joins += 1
            row.joined = self._joins
        if row.stage is _Stage.PAUSED:
            row.stage = _Stage.DECODING
            return Resume(row.row_id)
        row.stage = _Stage.READING
        self._hurried = any(
            other.level < BULK for other in self._rows.values() if other.stage is _Stage.DECODING
        )
        return Prefill(row.row_id, self._chunk_of(row), joins)

    def _chunk_of(self, row: _Row) -> int:
        """Tokens of a row's prompt to read at a time."""
        return self._pace.chunk(row.context, self._hurried, row.left)

    def _victim(self) -> _Row | None:
        """The bulk row that has decoded for the shortest time."""
        rows = self._rows.values()
        bulk = [row for row in rows if row.level == BULK and not row.aged]
        decoding = [row for row in bulk if row.stage is _Stage.DECODING]
        return max(decoding, key=lambda row: row.joined, default=None)

    def _age(self) -> None:
        now = self._clock()
        for row in self._rows.values():
            if not row.stage.in_batch and now - row.since >= self._patience:
                row.aged = True
