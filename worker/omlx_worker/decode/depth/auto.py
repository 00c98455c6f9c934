"""The `auto` policy: drafts as deep as makes the most tokens per second, as far as is known.

A depth makes (rows + drafts accepted) / (seconds of a step). Now and then the depth that was timed
longest ago runs for a few steps, which tells what it takes and brings.
"""

from __future__ import annotations

from collections.abc import Sequence

from omlx_worker.decode.depth.acceptance import Acceptance, RowView
from omlx_worker.decode.depth.step_times import StepTimes, cell_of
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.interface import depths_of

MARGIN = 0.005
"""Drafts that a depth is to accept more than a shallower one, of each row."""

PROBE, INTERVAL = 8, 600
"""Steps of a probe, and from a change or a probe to the next probe; more where that is slow."""


class AutoPolicy:
    """See the module. Of at most ``max_depth`` drafts up to ``own_depth`` are the model's own.

    Attributes:
        times: of steps.
    """

    def __init__(self, max_depth: int, own_depth: int) -> None:
        self.times, self._acceptance = StepTimes(), Acceptance(max_depth, own_depth)
        self._cell = (-1, -1)  # of the step whose outcome is observed next
        self._depths = depths_of(max_depth, own_depth)
        self._depth, self._reason = 0, ""
        self._since, self._timed = 0, True
        self._probed, self._left = 0, 0  # the depth of a probe, and steps that are left of it

    def choose(self, rows: Sequence[RowView], slots: int) -> tuple[int, str]:
        """See `DepthPolicy`."""
        accepted, last = self._acceptance.expected(rows), self._cell
        cell = self._cell = cell_of(slots, max((row.context for row in rows), default=0))
        top = max((row.limit for row in rows), default=0)
        if top == 0:
            return 0, "no row drafts"
        seconds = self.times.at(cell, self._worthwhile(accepted, len(rows), top))
        speeds = {depth: (len(rows) + accepted[depth]) / seconds[depth] for depth in seconds}
        best = max(sorted(speeds), key=speeds.__getitem__)
        if cell[0] != last[0] or self._depth not in speeds:
            self._depth, self._reason = best, "the best as far as is known"
        self._since += 1
        oldest = next((depth for depth in speeds if depth != self._depth), self._depth)
        due = INTERVAL * seconds[oldest] / seconds[self._depth]
        if self._timed and oldest != self._depth and self._since >= due:
            self._probed, self._left, self._since = oldest, PROBE, 0
        if self._left:
            self._left -= 1
            return self._probed, f"measuring depth {self._probed}"
        if best != self._depth and self._since > PROBE:
            gain = speeds[best] / speeds[self._depth]
            self._reason = f"depth {best}: {gain - 1:+.0%} against depth {self._depth}"
            self._depth, self._since = best, 0
        return self._depth, self._reason

    def observe(self, emissions: Sequence[Emission], depth: int, seconds: float | None) -> None:
        """See `DepthPolicy`."""
        self._acceptance.observe(emissions, depth)
        self._timed = seconds is not None
        if seconds:
            self.times.add(self._cell, depth, seconds)

    def _worthwhile(self, accepted: Sequence[float], rows: int, top: int) -> set[int]:
        """The depths up to ``top`` that accept more than any shallower one does."""
        found, most = {0}, MARGIN * rows
        for depth in sorted({min(depth, top) for depth in self._depths}):
            if accepted[depth] > most:
                found.add(depth)
                most = accepted[depth] + MARGIN * rows
        return found
