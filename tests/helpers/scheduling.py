"""A scheduler that is driven step by step, with a clock of its own."""

from __future__ import annotations

from omlx_worker.decode.actions import Action, Evict, Join, Pause, Prefill, Resume
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.row import DEFAULT, DecodeRow
from omlx_worker.decode.scheduler import Scheduler
from omlx_worker.engine.rows.row import Known, Row, Sampling
from tests.helpers.clock import Clock


class Rows:
    """A scheduler of rows that take a byte each, in the batch as well as paused."""

    def __init__(
        self,
        max_rows: int = 4,
        chunk: int = 8,
        memory: int = 100,
        *,
        shares: bool = False,
        pads: bool = True,
    ) -> None:
        self.clock = Clock()
        budget = MemoryBudget(memory, 0, len)
        self.chunks = ChunkSize(chunk)
        self.scheduler = Scheduler(
            max_rows,
            self.chunks,
            budget,
            shares=shares,
            pads=pads,
            clock=self.clock,
        )
        self.rows: dict[str, DecodeRow] = {}
        self.held: dict[str, int] = {}

    @classmethod
    def filled(cls, *levels: int, places: int = 0) -> Rows:
        """A batch of decoding rows, ``row-0`` and so on, of these levels; full without places."""
        rows = cls(places or len(levels))
        for place, level in enumerate(levels):
            rows.add(f"row-{place}", 1, level)
        while len(rows.scheduler.decoding) < len(levels):
            rows.drive()
        rows.drive()
        return rows

    def add(
        self, name: str, prompt: int | list[int], level: int = DEFAULT, *, cache: bool = True
    ) -> None:
        """Add a row with this prompt, or with one of as many tokens that no other row shares."""
        if isinstance(prompt, int):
            prompt = [1000 + len(self.rows)] * (prompt + 1)
        row = DecodeRow(Row(name, prompt, 100, Sampling(), cache=cache), level)
        self.rows[name] = row
        self.scheduler.add(row)

    def remove(self, name: str) -> None:
        self.scheduler.remove(self.rows[name])

    def drive(self, *, keeps: bool = True) -> Action:
        action = self.scheduler.next()
        if isinstance(action, Join):
            self.scheduler.took(action.row, known(action.row, self.held.get(action.row.row_id, 0)))
        elif isinstance(action, Prefill):
            left = {row.row_id: row.left - count for row, count in action.tokens.items()}
            self.scheduler.read(action, left)
        elif isinstance(action, Pause):
            self.scheduler.paused(action.row, 1 if keeps else None)
        return action

    def told(self, steps: int = 1, *, keeps: bool = True) -> list[str]:
        """The next actions in words."""
        return [words(self.drive(keeps=keeps)) for _ in range(steps)]


def known(row: DecodeRow, held: int = 0) -> Known:
    """What an engine knows of a row whose first ``held`` tokens are in its prefix cache."""
    return Known(held, left=row.length - 1 - held)


def words(action: Action) -> str:
    match action:
        case Prefill(tokens):
            return "read " + ", ".join(f"{n} of {row.row_id}" for row, n in tokens.items())
        case Join(row) | Pause(row) | Resume(row) | Evict(row):
            return f"{type(action).__name__.lower()} {row.row_id}"
    return type(action).__name__.lower()
