"""What a depth policy sees and answers, and its record of what steps take and bring.

How deep to draft and how many rows to run hang together, since rows and drafts fill the same tile
of a product. A policy chooses the depth by its record, `BatchSize` the number of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from omlx_worker.decode.depth.acceptance import Acceptance, RowView
from omlx_worker.decode.depth.step_times import StepTimes, cell_of
from omlx_worker.engine.rows.row import Emission

Mode = Literal["auto", "hybrid", "mtp", "batched"]


class BatchSpeed(NamedTuple):
    """How fast a batch is.

    Attributes:
        depth: drafts a row and step, at most.
        tokens: a second, of all rows together.
    """

    rows: int
    depth: int
    tokens: float


class DepthPolicy(ABC):
    """Asked before every step; told about every step once its outcome is read.

    Of at most ``max_depth`` drafts up to ``own_depth`` are the model's own.

    Attributes:
        cell: of the step whose outcome is observed next.
        accepted: drafts that its rows are expected to accept together, by its depth.
        times: of steps.
        tried: the depths that it chooses from.
    """

    def __init__(self, max_depth: int, own_depth: int) -> None:
        self.cell, self.accepted, self._rows = (-1, -1), [0.0], 1
        self.times, self._acceptance = StepTimes(), Acceptance(max_depth, own_depth)
        self.tried: Collection[int] = (0,)

    @abstractmethod
    def choose(self, rows: Sequence[RowView], slots: int, coming: int = 0) -> tuple[int, str]:
        """How deep rows draft in the next step, each up to its limit, and why.

        Args:
            slots: of the batch in the step whose outcome is observed next.
            coming: rows that join after that step; see `Scheduler.coming`.
        """

    def look(self, rows: Sequence[RowView], slots: int) -> None:
        """See the rows of the next step; the arguments are those of `choose`."""
        self.accepted, self._rows = self._acceptance.expected(rows), max(1, len(rows))
        self.cell = cell_of(slots, max((row.context for row in rows), default=0))

    def observe(self, emissions: Sequence[Emission], depth: int, seconds: float | None) -> None:
        """Learn from a step whose outcome has been read.

        Args:
            emissions: one a row.
            depth: drafts in the window that it verified.
            seconds: since the step before; None if anything but a step at this depth took time.
        """
        self._acceptance.observe(emissions, depth)
        if seconds:
            self.times.add(self.cell, depth, seconds)

    def compare(self, sizes: Sequence[int]) -> list[BatchSpeed]:
        """Full batches of these sizes, each at the fastest of the depths that are tried.

        They are compared in those contexts, of all in which each was timed, that are nearest to
        the rows' own; without any the list is empty.
        """
        tokens = [1 + accepted / self._rows for accepted in self.accepted]
        found = []
        for size, seconds in zip(sizes, self.times.alike(sizes, self.cell[1]), strict=False):
            speeds = {k: size * tokens[k] / seconds[k] for k in self.tried if k in seconds}
            if not speeds:
                return []
            best = max(speeds, key=speeds.__getitem__)
            found.append(BatchSpeed(size, best, speeds[best]))
        return found
