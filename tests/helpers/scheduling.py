"""A scheduler that is driven step by step, with a clock of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.scheduler import Act, Scheduler
from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import DEFAULT, Row, Stage
from tests.helpers.clock import Clock


class Rows:
    """A scheduler of rows that take a byte each, in the batch as well as suspended."""

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
        self.rows: dict[str, Row] = {}
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
        self,
        name: str,
        prompt: int | list[int],
        level: int = DEFAULT,
        *,
        cache: bool = True,
        pictures: Sequence[Picture] = (),
    ) -> None:
        """Add a row with this prompt, or with one of as many tokens that no other row shares."""
        if isinstance(prompt, int):
            prompt = [1000 + len(self.rows)] * (prompt + 1)
        asked = RowRequest(name, prompt, 100, Sampling(), cache=cache, pictures=tuple(pictures))
        row = Row(asked, level)
        self.rows[name] = row
        self.scheduler.add(row)

    def remove(self, name: str) -> None:
        self.scheduler.remove(self.rows[name])

    def drive(self) -> Act:
        """Do the next act, as the loop and the engine do."""
        act = self.scheduler.next()
        follow(self.scheduler, act, held=self.held)
        return act

    def told(self, steps: int = 1) -> list[str]:
        """The next acts in words."""
        return [words(self.drive()) for _ in range(steps)]


def follow(
    scheduler: Scheduler,
    act: Act,
    seconds: float | None = None,
    held: Mapping[str, int] | None = None,
) -> None:
    """Do with rows what an engine does.

    Args:
        seconds: that a chunk takes.
        held: tokens of rows, by their names, that the prefix cache holds.
    """
    if row := act.row:
        if row.stage is Stage.READING:
            row.computed = row.cached = (held or {}).get(row.row_id, 0)
        elif row.stage is Stage.SUSPENDED:
            row.kept_bytes = 1
    elif act.look:
        picture = act.look.unseen(act.look.left)
        assert picture is not None
        act.look.saw(picture)
    elif act.chunk:
        for row, count in act.chunk.tokens.items():
            row.computed += count
        scheduler.read(act.chunk, seconds)


_MOVES = {
    Stage.READING: "join",
    Stage.SUSPENDED: "suspend",
    Stage.DECODING: "resume",
    Stage.WAITING: "evict",
}


def words(act: Act) -> str:
    if act.row:
        return f"{_MOVES[act.row.stage]} {act.row.row_id}"
    if act.look:
        return f"look for {act.look.row_id}"
    if act.chunk:
        told = (f"{count} of {row.row_id}" for row, count in act.chunk.tokens.items())
        return "read " + ", ".join(told)
    return "decode" if act.rows else "idle"
