"""A row: one record of a sequence being generated, from its admission to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from omlx_worker.engine.rows.interface import Size
from omlx_worker.engine.rows.row import Known, Row

HIGH, DEFAULT, BULK = 0, 1, 2
"""Levels, the best one first."""


class Stage(Enum):
    """Where a row is: it waits, reads its prompt, decodes, is paused with its cache, or is done."""

    WAITING = auto()
    READING = auto()
    DECODING = auto()
    PAUSED = auto()
    DONE = auto()


@dataclass(eq=False, slots=True)
class DecodeRow:
    """One sequence being generated. Its stage changes in the methods here alone.

    A thread that prepares jobs makes it; the decode thread owns it from its admission on. The
    traffic thread reads ``tokens``, as far as emissions have told it.

    Attributes:
        request: what to generate, as the engine takes it.
        level: `HIGH`, `DEFAULT` or `BULK`.
        tokens: produced so far, oldest first, by an interrupted run too.
        left: tokens to read before it decodes; its last one is read by its first step.
        context: tokens in its cache while it reads its prompt.
        cached: tokens of its prompt that were not read, because the prefix cache held them.
        kin: rows whose prompts begin alike, and the tokens in common, until it decodes.
        stops: contexts at which reading stops, because other rows may go on from there.
        arrival: smaller for rows that queued up earlier.
        join_order: smaller for rows that joined the batch earlier.
        since: when it began to wait, in seconds of the scheduler's clock.
        aged: it has waited so long that it goes first and is not paused again.
        kept_bytes: what its cache takes while it is paused.
    """

    request: Row
    level: int = DEFAULT
    tokens: list[int] = field(default_factory=list)
    stage: Stage = Stage.WAITING
    left: int = 0
    context: int = 0
    cached: int = 0
    kin: dict[DecodeRow, int] = field(default_factory=dict)
    stops: set[int] = field(default_factory=set)
    arrival: int = 0
    join_order: int = 0
    since: float = 0.0
    aged: bool = False
    kept_bytes: int = 0

    def wait(self) -> None:
        """It waits for its turn, with nothing in the engine."""
        self.stage, self.left = Stage.WAITING, self.length - 1
        self.context = self.kept_bytes = 0

    def join(self) -> None:
        """It has a place in the batch, where its prompt is read."""
        self.stage = Stage.READING

    def take(self, known: Known) -> None:
        """The engine has taken it in, and the prefix cache what it knows of its prompt."""
        self.context, self.left = known.cached, known.left
        self.cached = max(self.cached, min(known.cached, len(self.request.prompt)))

    def read(self, left: int) -> None:
        """More of it is read, up to ``left`` tokens; with 0 it decodes."""
        self.context += self.left - left
        self.left = left
        if not left:
            self.stage = Stage.DECODING
            self.kin.clear()

    def pause(self, kept_bytes: int) -> None:
        """It has left the batch, which keeps ``kept_bytes`` to go on from."""
        self.stage, self.kept_bytes = Stage.PAUSED, kept_bytes

    def resume(self) -> None:
        """It decodes again after a pause."""
        self.stage, self.kept_bytes = Stage.DECODING, 0

    def end(self) -> None:
        """It has finished, or was dropped."""
        self.stage = Stage.DONE
        self.kin.clear()

    @property
    def row_id(self) -> str:
        return self.request.row_id

    @property
    def job_id(self) -> str:
        """The job of which it is a choice."""
        return self.request.row_id.partition(":")[0]

    @property
    def rank(self) -> tuple[int, int]:
        """Rows with a smaller rank go first."""
        return (HIGH if self.aged else self.level, self.arrival)

    @property
    def in_batch(self) -> bool:
        return self.stage in (Stage.READING, Stage.DECODING)

    @property
    def in_engine(self) -> bool:
        """Whether the engine holds something of it."""
        return self.in_batch or self.stage is Stage.PAUSED

    @property
    def length(self) -> int:
        """Tokens of its prompt and its text."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def size(self) -> Size:
        """What it asks of memory."""
        size = self.request.size(0 if self.stage is Stage.DECODING else self.length)
        return (*size, self._shares) if self.stage is Stage.WAITING else size

    @property
    def _shares(self) -> int:
        """Tokens at its beginning that rows in the batch have read, which the engine has kept."""
        read = (shared for kin, shared in self.kin.items() if kin.has_read(shared))
        return max(read, default=0)

    def has_read(self, tokens: int) -> bool:
        """Whether it has these of its prompt in the engine."""
        return self.stage is Stage.DECODING or (self.in_engine and self.context >= tokens)

    @property
    def until_stop(self) -> int:
        """Tokens to read until the next stop, or all that are left."""
        stops = [stop - self.context for stop in self.stops if stop > self.context]
        return min([self.left, *stops])

    def stops_after(self, tokens: int) -> bool:
        """Whether reading stops once ``tokens`` more are read."""
        return self.context + tokens in self.stops

    @property
    def resumed(self) -> Row:
        """The request of a row that goes on from the tokens it has."""
        return replace(self.request, generated=tuple(self.tokens))
