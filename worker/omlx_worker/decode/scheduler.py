"""Which row runs next. Knows no engine, no Redis and no threads.

Rows wait until a place in the batch is free, the best level first and the oldest first among
equals. A row that has waited for `PATIENCE_SECONDS` counts as one of the best level and is not
paused again, so no row waits for ever. Where a row that began at the best level has no place, the
bulk row that joined last is paused and takes its turn again later. When a choice of a job joins,
its other choices queue up again, behind the rows that came in the meantime.

Prompts are read in chunks with a decode step between any two, so running rows never wait for more
than one chunk. Within a level chunks go to the oldest row and to the shortest rest by turns: a
short prompt does not wait for the end of a long one, nor a long one for a stream of short ones.
Rows of one level join until prompts that are not twice as long fill `AHEAD` chunks, and are read
together. A chunk of bulk rows that is half empty waits until decoding without them has cost as much
as a chunk costs however few its tokens, so that rows that come meanwhile share it. A row waits
while another one reads a beginning that both share, and takes it from the prefix cache then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from omlx_worker.decode.actions import (
    Action,
    Decode,
    Evict,
    Idle,
    Join,
    Pause,
    Prefill,
    Resume,
)
from omlx_worker.decode.beginnings import SHORTEST, awaits, note
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.row import BULK, HIGH, DecodeRow, Stage
from omlx_worker.engine.rows.row import Known
from omlx_worker.queue.order import PATIENCE_SECONDS

AHEAD = 4
"""Chunks of unread tokens up to which rows join, so that prompts of similar length meet."""


class Scheduler:
    """Chooses the next action; the caller reports what came of it.

    Args:
        max_rows: rows in the batch at the same time, at first.
        chunks: how many prompt tokens to read at a time.
        budget: whether rows fit into memory together.
        shares: whether the engine keeps beginnings of prompts.
        pads: whether it reads prompts of different lengths together.

    Attributes:
        max_rows: rows in the batch at the same time.
        bulk_rows: rows in the batch up to which bulk rows join, unless they have aged.
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
        self._arrivals = self._joins = 0
        self._rows: dict[str, DecodeRow] = {}
        self._decode_is_due = self._follows_chunk = self._hurried = False
        self._oldest_is_due = True
        self._lost = 0.0

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
        """Rows expected to decode soon, each after a chunk of its own or a shared one.

        0 while more than a chunk of some prompt is left.
        """
        if not self._follows_chunk:
            return 0
        reading = self._in(Stage.READING)
        if any(self._chunk_of(row, row.left) < row.left for row in reading):
            return 0
        return len(reading) + self._joining

    @property
    def _joining(self) -> int:
        """Rows that wait and find a place, if there is memory."""
        return min(self.waiting, max(0, self.bulk_rows - self.joined))

    def add(self, row: DecodeRow) -> None:
        """Let a row wait for its turn."""
        row.wait()
        self._queue_up(row)
        if self._shares:
            note(row, self._rows.values(), self._chunks.unit)
        self._rows[row.row_id] = row

    def remove(self, row: DecodeRow) -> None:
        """Forget a row that has finished or was dropped; an unknown row is ignored."""
        row.end()
        if self._rows.get(row.row_id) is row:
            del self._rows[row.row_id]

    def took(self, row: DecodeRow, known: Known) -> None:
        """Report a `Join`: what the engine knows of the row."""
        row.take(known)
        if known.shared >= known.cached + SHORTEST:
            row.stops.add(known.shared)

    def read(self, action: Prefill, left: Mapping[str, int], seconds: float | None = None) -> None:
        """Report a `Prefill`: how many tokens are left of each row, and how long it took."""
        if seconds is not None and any(action.tokens.values()):
            context = action.rows[0].context
            self._chunks.read(context, self._hurried, action.computed, seconds)
        for row in action.rows:
            row.read(left[row.row_id])

    def paused(self, row: DecodeRow, kept_bytes: int | None) -> None:
        """Report a `Pause`.

        Args:
            kept_bytes: what the cache takes; None if it is lost and the tokens are read again.
        """
        if kept_bytes is None:
            row.wait()
        else:
            row.pause(kept_bytes)

    def next(self) -> Action:
        """What to do now. A row that joins, resumes or loses its cache counts as such at once."""
        decoding = self.decoding
        self._hurried = any(row.level < BULK for row in decoding)
        self._follows_chunk = self._decode_is_due and bool(decoding)
        action = None if self._follows_chunk else self._admit() or self._prefill()
        self._decode_is_due = isinstance(action, Prefill)
        return action or (Decode() if decoding else Idle())

    def _in(self, stage: Stage) -> list[DecodeRow]:
        return [row for row in self._rows.values() if row.stage is stage]

    def _admit(self) -> Join | Pause | Resume | Evict | None:
        """Give the best row that waits a place, if one is free or can be made."""
        self._age()
        reading = sorted(self._in(Stage.READING), key=_rank)
        waiting = [row for row in self._rows.values() if not row.in_batch]
        if self._shares:
            waiting = [row for row in waiting if not awaits(row, reading)]
        best = next((row for row in _turns(waiting) if self._is_due(row, reading)), None)
        if best is None:
            return None
        if self._has_place_for(best):
            return self._evict_for(best) or self._bring_in(best)
        if best.level == HIGH and (victim := self._victim()):
            victim.since = self._clock()
            return Pause(victim)
        return None

    def _is_due(self, row: DecodeRow, reading: Sequence[DecodeRow]) -> bool:
        """Whether it goes before the rows whose prompts are being read, or is read beside them.

        Args:
            reading: these rows, the best one first.
        """
        if not reading or row.rank < reading[0].rank:
            return True
        first = reading[0]
        unread = sum(other.left for other in reading if other.left < 2 * row.left)
        chunk = self._chunks.whole(first.context, self._hurried)
        return row.rank[0] == first.rank[0] and unread < AHEAD * chunk

    def _prefill(self) -> Prefill | None:
        """A chunk of the row whose turn it is, and of rows that can be read with it."""
        reading = self._in(Stage.READING)
        if not reading:
            return None
        oldest, shortest = _turns(reading)
        first = oldest if self._oldest_is_due else shortest
        chunk = Prefill({first: self._chunk_of(first, first.until_stop)})
        alike = [row for row in reading if row.rank[0] == first.rank[0] and row is not first]
        room = self._chunks.whole(first.context, self._hurried)
        most = self._chunks.padding(first.context, self._hurried) if self._pads else 0
        for row in sorted(alike, key=lambda row: abs(row.until_stop - chunk.tokens[first])):
            larger = Prefill({**chunk.tokens, row: self._chunk_of(row, row.until_stop)})
            if larger.computed <= room and larger.padding - chunk.padding <= most:
                chunk = larger
        if first.rank[0] == BULK and 2 * chunk.computed <= room and self._gathers(first.context):
            return None
        self._oldest_is_due, self._lost = not self._oldest_is_due, 0.0
        return chunk

    def _gathers(self, context: int) -> bool:
        """Whether to decode once more before a chunk that others may share; counts what it costs.

        A step without the rows that could decode too costs their share of its time.
        """
        decoding = len(self.decoding)
        if not decoding or self._lost >= self._chunks.steps_for(context, self._hurried):
            return False
        absent = self.joined - decoding + self._joining
        self._lost += absent / (absent + decoding)
        return True

    def _has_place_for(self, row: DecodeRow) -> bool:
        """Whether it could join if no paused row kept its cache; alone, any row can."""
        batch = self._batch()
        most = self.bulk_rows if row.rank[0] == BULK else self.max_rows
        return not batch or (len(batch) < most and self._fits([*batch, row]))

    def _evict_for(self, row: DecodeRow) -> Evict | None:
        """The next paused row whose cache is in the way: the one to resume last goes first."""
        paused = [other for other in self._in(Stage.PAUSED) if other is not row]
        kept = sum(other.kept_bytes for other in paused)
        if not paused or self._fits([*self._batch(), row], beside=kept):
            return None
        victim = max(paused, key=_rank)
        victim.wait()
        return Evict(victim)

    def _fits(self, rows: list[DecodeRow], beside: int = 0) -> bool:
        return self._budget.fits([row.size for row in rows], beside)

    def _batch(self) -> list[DecodeRow]:
        return [row for row in self._rows.values() if row.in_batch]

    def _bring_in(self, row: DecodeRow) -> Join | Resume:
        self._joins += 1
        row.join_order = self._joins
        for other in self._in(Stage.WAITING):
            if other.job_id == row.job_id and not other.join_order:
                self._queue_up(other)
        kept = sum(other.kept_bytes for other in self._in(Stage.PAUSED) if other is not row)
        room = self._budget.room([each.size for each in [*self._batch(), row]], kept)
        if row.stage is Stage.PAUSED:
            row.resume()
            return Resume(row, room)
        row.join()
        return Join(row, room)

    def _chunk_of(self, row: DecodeRow, left: int) -> int:
        """Tokens of a row's prompt to read at a time, with ``left`` of them to read."""
        if row.request.whole:
            return row.left
        return self._chunks.chunk(row.context, self._hurried, left)

    def _victim(self) -> DecodeRow | None:
        """The bulk row that has decoded for the shortest time."""
        bulk = [row for row in self.decoding if row.level == BULK and not row.aged]
        return max(bulk, key=lambda row: row.join_order, default=None)

    def _queue_up(self, row: DecodeRow) -> None:
        """A row that has not joined yet waits behind all others of its level."""
        row.arrival, row.since, row.aged = self._arrivals, self._clock(), False
        self._arrivals += 1

    def _age(self) -> None:
        now = self._clock()
        for row in self._rows.values():
            if not row.in_batch and now - row.since >= PATIENCE_SECONDS:
                row.aged = True


def _rank(row: DecodeRow) -> tuple[int, int]:
    return row.rank


def _turns(rows: Sequence[DecodeRow]) -> list[DecodeRow]:
    """Of the rows of the best level the oldest, and the one with the least to read."""
    if not rows:
        return []
    oldest = min(rows, key=_rank)
    alike = [row for row in rows if row.rank[0] == oldest.rank[0]]
    return [oldest, min(alike, key=lambda row: (row.left, row.arrival))]
