"""Who runs next. Pure Python: knows rows by name and length, no Redis and no MLX.

Rows wait until a place in the batch is free, the best priority first and the oldest first among
equals. Prompts are read in chunks with a decode step between any two chunks, so that running rows
never wait for more than one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefill:
    """Read ``tokens`` more of a row's prompt; the row joins the batch with its first chunk."""

    row_id: str
    tokens: int
    joins: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """Run one step for all rows whose prompts are read."""


@dataclass(frozen=True, slots=True)
class Idle:
    """There is nothing to do."""


Action = Prefill | Decode | Idle


@dataclass(slots=True)
class _Row:
    row_id: str
    rank: tuple[int, int]
    left: int
    joined: bool = False


class Scheduler:
    """Chooses the next action; the caller reports what came of it.

    Args:
        max_rows: rows in the batch at the same time.
        prefill_chunk: prompt tokens read between two decode steps.
    """

    def __init__(self, max_rows: int, prefill_chunk: int) -> None:
        self._max_rows = max_rows
        self._chunk = prefill_chunk
        self._arrivals = 0
        # Rows whose prompts are not fully read, waiting ones included; then those decoding.
        self._reading: dict[str, _Row] = {}
        self._decoding: dict[str, None] = {}
        self._decode_is_due = False

    @property
    def decoding(self) -> int:
        """How many rows the next decode step runs."""
        return len(self._decoding)

    @property
    def decoding_rows(self) -> list[str]:
        """The rows that the next decode step runs, in the order in which they came to it."""
        return list(self._decoding)

    @property
    def joined(self) -> int:
        """How many rows hold a place in the batch."""
        return len(self._decoding) + sum(row.joined for row in self._reading.values())

    def add(self, row_id: str, prompt_tokens: int, priority: int = 0) -> None:
        """Let a row wait for its turn; a smaller priority goes first."""
        self._reading[row_id] = _Row(row_id, (priority, self._arrivals), prompt_tokens)
        self._arrivals += 1

    def remove(self, row_id: str) -> None:
        """Forget a row that has finished or was dropped; unknown ids are ignored."""
        self._reading.pop(row_id, None)
        self._decoding.pop(row_id, None)

    def read(self, row_id: str, left: int) -> None:
        """Report how many prompt tokens of a row are left after a `Prefill`."""
        if left:
            self._reading[row_id].left = left
        else:
            del self._reading[row_id]
            self._decoding[row_id] = None

    def has_joined(self, row_id: str) -> bool:
        """Whether a row has a place in the batch."""
        row = self._reading.get(row_id)
        return row.joined if row else row_id in self._decoding

    def next(self) -> Action:
        """What to do now. A row that joins counts as joined from here on."""
        row = None if self._decode_is_due and self._decoding else self._next_to_read()
        if row is None:
            self._decode_is_due = False
            return Decode() if self._decoding else Idle()
        self._decode_is_due = True
        joins = not row.joined
        row.joined = True
        return Prefill(row.row_id, min(self._chunk, row.left), joins)

    def _next_to_read(self) -> _Row | None:
        room = self.joined < self._max_rows
        rows = [row for row in self._reading.values() if row.joined or room]
        return min(rows, key=lambda row: row.rank, default=None)
