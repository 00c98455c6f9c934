"""What steps of any size take and bring: one record for two choices.

How deep to draft and how many rows to run hang together, since rows and drafts fill the same tile
of a product. `AutoPolicy` chooses the depth by this record, `BatchSize` the number of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from omlx_worker.decode.depth.acceptance import Acceptance
from omlx_worker.decode.depth.policies import BatchSpeed, RowView
from omlx_worker.decode.depth.step_times import StepTimes, cell_of
from omlx_worker.engine.rows.row import Emission


class Speeds:
    """Of at most ``max_depth`` drafts up to ``own_depth`` are the model's own.

    Attributes:
        cell: of the step whose outcome is observed next.
        accepted: drafts that its rows are expected to accept together, by its depth.
    """

    def __init__(self, max_depth: int, own_depth: int) -> None:
        self._acceptance, self._times = Acceptance(max_depth, own_depth), StepTimes()
        self.cell, self.accepted, self._rows = (-1, -1), [0.0], 1

    def look(self, rows: Sequence[RowView], slots: int) -> None:
        """See the rows of the next step; ``slots`` as in `DepthPolicy.choose`."""
        self.accepted, self._rows = self._acceptance.expected(rows), max(1, len(rows))
        self.cell = cell_of(slots, max((row.context for row in rows), default=0))

    def observe(self, emissions: Sequence[Emission], depth: int, seconds: float | None) -> None:
        """See `DepthPolicy`."""
        self._acceptance.observe(emissions, depth)
        if seconds:
            self._times.add(self.cell, depth, seconds)

    def seconds(self, depths: Iterable[int]) -> dict[int, float]:
        """Of steps like the next at each of these depths; see `StepTimes.at`."""
        return self._times.at(self.cell, depths)

    def compare(self, sizes: Sequence[int], depths: Collection[int]) -> list[BatchSpeed]:
        """Full batches of these sizes, each at the fastest of these depths.

        They are compared in those contexts, of all in which each was timed, that are nearest to
        the rows' own; without any the list is empty.
        """
        tokens = [1 + accepted / self._rows for accepted in self.accepted]
        found = []
        for size, seconds in zip(sizes, self._times.alike(sizes, self.cell[1]), strict=False):
            speeds = {k: size * tokens[k] / seconds[k] for k in depths if k in seconds}
            if not speeds:
                return []
            best = max(speeds, key=speeds.__getitem__)
            found.append(BatchSpeed(size, best, speeds[best]))
        return found
