"""Which row runs next. Knows no engine, no Redis and no threads.

Rows wait until a place in the batch is free, the best level first and the oldest first among
equals. A row that has waited for `PATIENCE_SECONDS` counts as one of the best level and is not
suspended again, so no row waits for ever. Where a row that began at the best level has no place,
the bulk row that joined last is suspended, and waits for a place again. When a choice of a job
joins, its other choices queue up again, behind the rows that came in the meantime.

Prompts are read in chunks with a decode step between any two, so running rows never wait for more
than one chunk. A tower looks at a picture in an act of its own before its chunk, in the same way.
Within a level chunks go to the oldest row and to the shortest rest by turns: a short prompt does
not wait for the end of a long one, nor a long one for a stream of short ones. Rows of one level
join until prompts that are not twice as long fill a chunk, and are read together. A half-empty
chunk of bulk rows waits `GATHERING` steps for more of them. A row waits while another one reads a
beginning that both share, and takes it from the prefix cache then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from omlx_worker.decode.beginnings import SHORTEST, awaits, note
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.engine.rows.row import BULK, HIGH, Row, Stage
from omlx_worker.queue.order import PATIENCE_SECONDS

GATHERING = 4
"""Steps that a half-empty chunk of bulk rows waits for more of them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of some rows' prompts, to be read in one forward.

    Attributes:
        tokens: how many of each row.
        context: tokens that the first row has read before.
    """

    tokens: dict[Row, int]
    context: int

    @property
    def rows(self) -> list[Row]:
        return list(self.tokens)

    @property
    def unseen(self) -> Row | None:
        """A row with a picture to look at before the chunk can be read."""
        return next((row for row, count in self.tokens.items() if row.unseen(count)), None)

    @property
    def computed(self) -> int:
        """Tokens of the forward, padding included."""
        return len(self.tokens) * max(self.tokens.values())

    @property
    def padding(self) -> int:
        return self.computed - sum(self.tokens.values())


@dataclass(frozen=True, slots=True)
class Act:
    """What the engine does next: the first attribute that is set. If none is, it idles.

    Attributes:
        row: its stage has changed: it joins, is suspended, is resumed, or loses its pages.
        look: the tower looks at its next picture, which is read next.
        chunk: what is read.
        rows: those that decode a step.
    """

    row: Row | None = None
    look: Row | None = None
    chunk: Chunk | None = None
    rows: list[Row] = field(default_factory=list)


class Scheduler:
    """Chooses which rows the engine works on next. Nothing calls back into it.

    Args:
        max_rows: rows in the batch at the same time, at first.
        chunks: how many prompt tokens to read at a time.
        budget: whether rows fit into memory together.
        shares: whether the engine keeps beginnings of prompts.
        pads: whether it reads prompts of different lengths together.

    Attributes:
        max_rows: rows in the batch at the same time.
        bulk_rows: rows in the batch up to which bulk rows join, unless they have aged.
        room: bytes that the prefix cache may take beside the rows, since one joined.
    """

    def __init__(
        self,
        max_rows: int,
        chunks: ChunkSize,
        budget: MemoryBudget,
        *,
        shares: bool = False,
        pads: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_rows = self.bulk_rows = max_rows
        self._chunks = chunks
        self._budget = budget
        self._shares = shares
        self._pads = pads
        self._clock = clock
        self.room = 0
        self._arrivals = self._joins = 0
        self._rows: dict[str, Row] = {}
        self._decode_is_due = self._hurried = False
        self._oldest_is_due = True
        self._gathered = 0

    def get(self, row_id: str) -> Row | None:
        return self._rows.get(row_id)

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    @property
    def decoding(self) -> list[Row]:
        """The rows that the next decode step runs."""
        return self._in(Stage.DECODING)

    @property
    def joined(self) -> int:
        """How many rows hold a place in the batch."""
        return sum(row.in_batch for row in self._rows.values())

    def add(self, row: Row) -> None:
        """Let a row wait for a place."""
        row.wait()
        self._queue_up(row)
        if self._shares:
            note(row, self._rows.values(), self._chunks.unit)
        self._rows[row.row_id] = row

    def rejoin(self, row: Row) -> None:
        """Let a row wait for a place again, from now on, to read all of its tokens there."""
        row.wait()
        row.since = self._clock()

    def remove(self, row: Row) -> None:
        """Forget a row that has finished or was dropped; an unknown row is ignored."""
        row.end()
        if self._rows.get(row.row_id) is row:
            del self._rows[row.row_id]

    def shared(self, row: Row, tokens: int) -> None:
        """Stop reading a row where the prefix cache knows that other prompts part from it."""
        if tokens >= row.computed + SHORTEST:
            row.stops.add(tokens)

    def read(self, chunk: Chunk, seconds: float | None = None) -> None:
        """A chunk is read: rows with nothing left decode.

        Args:
            seconds: how long it took; None if that says nothing.
        """
        if seconds is not None and any(chunk.tokens.values()):
            self._chunks.read(chunk.context, chunk.computed, seconds)
        for row in chunk.rows:
            if not row.left:
                row.decode()

    def next(self) -> Act:
        """What to do now. A row that changes its stage counts as such at once."""
        decoding = self.decoding
        self._hurried = any(row.level < BULK for row in decoding)
        row = look = chunk = None
        if not (self._decode_is_due and decoding):
            row = self._admit()
            chunk = None if row else self._chunk()
            look = chunk.unseen if chunk else None
        self._decode_is_due = chunk is not None
        return Act(row, look, None if look else chunk, decoding)

    def _in(self, stage: Stage) -> list[Row]:
        return [row for row in self._rows.values() if row.stage is stage]

    def _admit(self) -> Row | None:
        """Give the best row that waits a place, if one is free or can be made.

        Returns:
            That row, or one that is suspended or loses its pages for it.
        """
        waiting = [row for row in self._rows.values() if not row.in_batch]
        if not waiting:
            return None
        self._age(waiting)
        reading = sorted(self._in(Stage.READING), key=_rank)
        if self._shares:
            waiting = [row for row in waiting if not awaits(row, reading)]
        best = next((row for row in _turns(waiting) if self._is_due(row, reading)), None)
        if best is None:
            return None
        if self._has_place_for(best):
            return self._evict_for(best) or self._bring_in(best)
        if best.level == HIGH and (victim := self._victim()):
            victim.since = self._clock()
            victim.suspend()
            return victim
        return None

    def _is_due(self, row: Row, reading: Sequence[Row]) -> bool:
        """Whether it goes before the rows whose prompts are being read, or is read beside them.

        Args:
            reading: these rows, the best one first.
        """
        if not reading or row.rank < reading[0].rank:
            return True
        first = reading[0]
        unread = sum(other.left for other in reading if other.left < 2 * row.left)
        chunk = self._chunks.whole(first.computed, self._hurried)
        return row.rank[0] == first.rank[0] and unread < chunk

    def _chunk(self) -> Chunk | None:
        """A chunk of the row whose turn it is, and of rows that can be read with it."""
        reading = self._in(Stage.READING)
        if not reading:
            return None
        oldest, shortest = _turns(reading)
        first = oldest if self._oldest_is_due else shortest
        chunk = Chunk({first: self._chunk_of(first, first.until_stop)}, first.computed)
        alike = [row for row in reading if row.rank[0] == first.rank[0] and row is not first]
        room = self._chunks.whole(first.computed, self._hurried)
        for row in sorted(alike, key=lambda row: abs(row.until_stop - chunk.tokens[first])):
            tokens = {**chunk.tokens, row: self._chunk_of(row, row.until_stop)}
            larger = Chunk(tokens, first.computed)
            if larger.computed <= room and (self._pads or not larger.padding):
                chunk = larger
        half_empty = 2 * chunk.computed <= room and len(chunk.tokens) == len(reading)
        if first.rank[0] == BULK and half_empty and self.decoding and self._gathered < GATHERING:
            self._gathered += 1
            return None
        self._oldest_is_due = not self._oldest_is_due
        if not chunk.unseen:
            self._gathered = 0
        return chunk

    def _has_place_for(self, row: Row) -> bool:
        """Whether it could join if no suspended row kept its pages; alone, any row can."""
        batch = self._batch()
        most = self.bulk_rows if row.rank[0] == BULK else self.max_rows
        return not batch or (len(batch) < most and self._fits([*batch, row]))

    def _evict_for(self, row: Row) -> Row | None:
        """The suspended row that is in the way, which waits anew: of several the last to resume."""
        suspended = [other for other in self._in(Stage.SUSPENDED) if other is not row]
        kept = sum(other.kept_bytes for other in suspended)
        if not suspended or self._fits([*self._batch(), row], beside=kept):
            return None
        victim = max(suspended, key=_rank)
        victim.wait()
        return victim

    def _fits(self, rows: list[Row], beside: int = 0) -> bool:
        return self._budget.fits([row.size for row in rows], beside)

    def _batch(self) -> list[Row]:
        return [row for row in self._rows.values() if row.in_batch]

    def _bring_in(self, row: Row) -> Row:
        self._joins += 1
        row.join_order = self._joins
        for other in self._in(Stage.WAITING):
            if other.job_id == row.job_id and not other.join_order:
                self._queue_up(other)
        kept = sum(other.kept_bytes for other in self._in(Stage.SUSPENDED) if other is not row)
        self.room = self._budget.room([each.size for each in [*self._batch(), row]], kept)
        if row.stage is Stage.SUSPENDED:
            row.decode()
        else:
            row.join()
        return row

    def _chunk_of(self, row: Row, left: int) -> int:
        """Tokens of a row's prompt to read at a time, with ``left`` of them to read."""
        if row.request.whole:
            return row.left
        return row.uncut(self._chunks.chunk(row.computed, self._hurried, left))

    def _victim(self) -> Row | None:
        """The bulk row that has decoded for the shortest time."""
        bulk = [row for row in self.decoding if row.level == BULK and not row.aged]
        return max(bulk, key=lambda row: row.join_order, default=None)

    def _queue_up(self, row: Row) -> None:
        """A row that has not joined yet waits behind all others of its level."""
        row.arrival, row.since, row.aged = self._arrivals, self._clock(), False
        self._arrivals += 1

    def _age(self, waiting: Sequence[Row]) -> None:
        now = self._clock()
        for row in waiting:
            if now - row.since >= PATIENCE_SECONDS:
                row.aged = True


def _rank(row: Row) -> tuple[int, int]:
    return row.rank


def _turns(rows: Sequence[Row]) -> list[Row]:
    """Of the rows of the best level the oldest, and the one with the least to read."""
    if not rows:
        return []
    oldest = min(rows, key=_rank)
    alike = [row for row in rows if row.rank[0] == oldest.rank[0]]
    return [oldest, min(alike, key=lambda row: (row.left, row.arrival))]
