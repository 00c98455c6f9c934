"""What a depth policy sees and answers, and its record of what steps take and bring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from omlx_worker.decode.depth.acceptance import Acceptance, RowView
from omlx_worker.decode.depth.step_times import StepTimes, cell_of
from omlx_worker.engine.rows.emission import Emission

Mode = Literal["auto", "hybrid", "mtp", "batched"]


class DepthPolicy(ABC):
    """Asked before every step; told about every step once its outcome is read.

    Of at most ``max_depth`` drafts up to ``own_depth`` are the model's own.

    Attributes:
        cell: of the step whose outcome is observed next.
        accepted: drafts that its rows are expected to accept together, by its depth.
        times: of steps.
    """

    def __init__(self, max_depth: int, own_depth: int) -> None:
        self.cell, self.accepted = (-1, -1), [0.0]
        self.times, self._acceptance = StepTimes(), Acceptance(max_depth, own_depth)

    @abstractmethod
    def choose(self, rows: Sequence[RowView], slots: int) -> tuple[int, str]:
        """How deep rows draft in the next step, each up to its limit, and why.

        Args:
            slots: of the batch in the step whose outcome is observed next.
        """

    def look(self, rows: Sequence[RowView], slots: int) -> None:
        """See the rows of the next step; the arguments are those of `choose`."""
        self.accepted = self._acceptance.expected(rows)
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
