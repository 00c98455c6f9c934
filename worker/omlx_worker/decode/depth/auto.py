"""The `auto` policy: drafts as deep as makes the most tokens per second, as far as is known.

A depth makes (rows + drafts accepted) / (seconds of a step). The depth changes once the gains that
were forgone add up. Now and then another depth is probed, which tells what it takes and brings:
ever less often while probes change nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from omlx_worker.decode.depth.acceptance import RowView
from omlx_worker.decode.depth.policies import DepthPolicy
from omlx_worker.engine.rows.interface import depths_of
from omlx_worker.engine.rows.row import Emission

MARGIN, CHANGE = 0.005, 0.4  # gains of a step that count, and the sum that changes the depth
PROBE, INTERVAL = 6, 48  # steps of a probe, and from a change or a probe to the next probe
# Steps that probes may lose: for each step, at first and after many in vain; saved up at most.
BUDGET, LEAST_BUDGET, SAVED = 0.005, 0.001, 10.0
IN_VAIN = 0.8  # the share of the budget that is left after a probe


class AutoPolicy(DepthPolicy):
    """See the module."""

    def __init__(self, max_depth: int, own_depth: int) -> None:
        super().__init__(max_depth, own_depth)
        self._depths = depths_of(max_depth, own_depth)
        self._depth, self._reason = 0, ""
        self._regret, self._since, self._timed = 0.0, 0, True
        # By the slots' part of a cell: what is known of other numbers of slots is a guess.
        self._budget = defaultdict[int, float](lambda: BUDGET)
        self._saved = defaultdict[int, float](lambda: SAVED)
        self._probed, self._left = 0, 0  # the depth of a probe, and steps that are left of it

    def choose(self, rows: Sequence[RowView], slots: int, coming: int = 0) -> tuple[int, str]:
        """See `DepthPolicy`. No row drafts while more rows join than decode."""
        last = self.cell
        self.look(rows, slots)
        accepted, cell = self.accepted, self.cell
        top = max((row.limit for row in rows), default=0)
        if top == 0 or coming > len(rows):
            return 0, "rows join" if top else "no row drafts"
        seconds = self.times.at(cell, self._worthwhile(accepted, len(rows), top))
        self.tried = seconds.keys()
        speeds = {depth: (len(rows) + accepted[depth]) / seconds[depth] for depth in seconds}
        best = max(sorted(speeds), key=speeds.__getitem__)
        if cell[0] != last[0] or self._depth not in speeds:
            self._change(best, "the best as far as is known")
        now = self._depth
        self._since += 1
        size, budget = cell[0], self._budget[cell[0]]
        saved = self._saved[size] = min(self._saved[size] + budget, SAVED)
        if self._timed and self._since >= INTERVAL and len(speeds) > 1:
            probed = next(depth for depth in speeds if depth != now)
            # What steps at the depth in use would make more in the same time.
            loss = PROBE * (seconds[probed] / seconds[now]) * (1 - speeds[probed] / speeds[now])
            loss = min(loss, SAVED)  # it may be unusual times that make it large
            if saved >= loss:
                self._saved[size] -= loss
                self._budget[size] = max(IN_VAIN * budget, LEAST_BUDGET)
                self._probed, self._left, self._since = probed, PROBE, 0
        if self._left:
            self._left -= 1
            return self._probed, f"measuring depth {self._probed}"
        gain = speeds[best] / speeds[now] - 1
        self._regret = max(0.0, self._regret + min(gain - MARGIN, CHANGE / 4))
        if self._regret > CHANGE and self._since > PROBE:
            self._change(best, f"depth {best}: {gain:+.0%} against depth {now}")
            self._since = 0
        return self._depth, self._reason

    def observe(self, emissions: Sequence[Emission], depth: int, seconds: float | None) -> None:
        super().observe(emissions, depth, seconds)
        self._timed = seconds is not None

    def _worthwhile(self, accepted: Sequence[float], rows: int, top: int) -> set[int]:
        """The depths up to ``top`` that accept more than any shallower one does."""
        found, most = {0}, MARGIN * rows
        for depth in sorted({min(depth, top) for depth in self._depths}):
            if accepted[depth] > most:
                found.add(depth)
                most = accepted[depth] + MARGIN * rows
        return found

    def _change(self, depth: int, reason: str) -> None:
        if depth != self._depth:
            self._budget.pop(self.cell[0], None)
        self._depth, self._reason, self._regret = depth, reason, 0.0
