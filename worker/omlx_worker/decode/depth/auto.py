"""The `auto` policy: drafts as deep as yields the most tokens per second, as far as is known.

A depth K yields (rows + drafts accepted at K) / (seconds of a step at K). The time of the depth in
use is that of the last steps. Other depths are known relative to it, from when they were timed
last: other load on a machine slows all of them. The depth changes once the gains forgone add up to
`CHANGE` steps. Now and then another depth is probed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from omlx_worker.decode.depth.acceptance import Acceptance
from omlx_worker.decode.depth.records import Decision, RowView, StepReport, bucket_of, slots_for

# Durations are in steps, shares are of the depth in use.
MARGIN, CHANGE = 0.005, 0.4  # gains that count, and the sum of them that changes the depth
RECENT, ALIKE = 7, 3  # timings in a row whose median counts, at most and at least
PROBE, INTERVAL = 6, 48  # steps of a probe, and from one to the next, at least
BUDGET, SAVED = 0.005, 10.0  # share of the time for probes; steps saved, or owed, at most
JUMP = 0.15  # change of a step's time that puts other depths in doubt: they are probed on credit
EVERY = 4  # steps after which acceptance is added up again
GUESS = 0.08  # cost of one more draft where nothing is known

Key = tuple[int, int]


@dataclass(slots=True)
class Cell:
    """Step times at one number of slots and context bucket.

    Attributes:
        unit: seconds; moves with the time of the depth in use.
        costs: of each depth, in units.
        timed: the step and the unit when it was timed last. The unit is infinite until a depth was
            timed twice, some time apart: the first may have been a bad moment.
    """

    unit: float = 1.0
    costs: dict[int, float] = field(default_factory=dict)
    timed: dict[int, tuple[int, float]] = field(default_factory=dict)

    def time(self, depth: int, seconds: float, step: int, *, in_use: bool) -> None:
        if in_use and depth in self.costs:
            self.unit = seconds / self.costs[depth]
        else:
            self.costs[depth] = seconds / self.unit
        first, unit = self.timed.get(depth, (step, math.inf))
        sure = unit < math.inf or step - first >= INTERVAL
        self.timed[depth] = (step, self.unit) if sure else (first, unit)

    def estimate(self, depths: Sequence[int]) -> dict[int, float]:
        """The cost of each of these depths, the first of which is 0."""
        costs = {0: self.costs.get(0) or min(self.costs.values(), default=1.0)}
        for last, depth in pairwise(depths):
            guess = costs[last] * (1 + GUESS * (depth - last))
            costs[depth] = self.costs.get(depth) or guess
        return costs

    def unknown(self, speeds: Mapping[int, float], costs: Mapping[int, float]) -> int | None:
        """The shallowest unknown depth that would win if it cost no more than a shallower one."""
        known = max((speeds[depth] for depth in speeds if depth in self.costs), default=math.inf)
        for depth in speeds:
            if depth not in self.costs:
                cheapest = costs[max((other for other in speeds if other < depth), default=0)]
                wins = depth == 0 or speeds[depth] * costs[depth] / cheapest > known
                return depth if wins and self.costs else None
        return None


@dataclass(slots=True)
class _Size:
    """State at one number of slots: depth in use, gains forgone, steps since a probe, the probe."""

    depth: int
    reason: str
    regret: float = 0.0
    wait: int = 0
    probed: int = 0
    left: int = 0


class AutoPolicy:
    """Drafts as deep as pays.

    Args:
        max_depth: drafts a row and step, at most.
        own_depth: of those that the model makes itself; the others are looked up. None for all.
    """

    def __init__(self, max_depth: int, own_depth: int | None = None) -> None:
        own_depth = max_depth if own_depth is None else own_depth
        # Between the deepest of its own and the deepest at all one more will do.
        self._depths = sorted({*range(own_depth + 1), max_depth // 2, max_depth})
        self._acceptance = Acceptance(max_depth, own_depth)
        self._cells: dict[Key, Cell] = {}
        self._sizes: dict[int, _Size] = {}
        self._limits, self._accepted = dict[str, int](), [0.0] * (max_depth + 1)
        self._recent, self._last = deque[float](maxlen=RECENT), (0, 0)
        self._saved, self._timed, self._step = 2.0, True, 0

    def choose(self, rows: Sequence[RowView], slots: int, coming: int = 0) -> Decision:
        """See `DepthPolicy`. No row drafts while the rows that join outnumber those that decode."""
        self._step += 1
        limits = {row.row_id: min(row.limit, self._depths[-1]) for row in rows if row.limit > 0}
        changed = limits != self._limits
        if changed:
            self._limits = limits
            self._acceptance.keep(limits, {row.row_id for row in rows if row.constrained})
        if changed or self._step % EVERY == 0:
            self._accepted = self._acceptance.totals()
        self._acceptance.decide()
        top = max(limits.values(), default=0)
        if top == 0 or coming > len(rows):
            return self._decide(0, "rows join" if top else "no row drafts")
        slots = slots_for(slots)
        cell = self._cell((slots, bucket_of(max(row.context for row in rows))))
        depths = [depth for depth in self._depths if depth <= top]
        costs = cell.estimate(depths)
        speeds = {depth: (len(rows) + self._accepted[depth]) / costs[depth] for depth in depths}
        best = max(depths, key=speeds.__getitem__)
        if slots not in self._sizes:
            known = max(cell.costs.keys() & speeds, key=speeds.__getitem__, default=0)
            self._sizes[slots] = _Size(known, "the best when last measured")
        size = self._sizes[slots]
        current = max(depth for depth in depths if depth <= size.depth)
        self._saved, size.wait = min(self._saved + BUDGET, SAVED), size.wait + 1
        if not size.left and self._timed:
            self._begin(size, cell, current, speeds, costs)
        if size.left:
            size.left -= 1
            probed = min(size.probed, top)
            return self._decide(probed, f"measuring depth {probed}")
        gain = speeds[best] / speeds[current] - 1
        size.regret = max(0.0, size.regret + gain - MARGIN)
        if size.regret > CHANGE and size.wait > PROBE:
            size.reason = f"depth {best}: {gain:+.0%} against depth {current}"
            size.depth, size.regret, size.wait = best, 0.0, 0
            cell.timed.pop(current, None)
            current = best
        return self._decide(current, size.reason)

    def observe(self, report: StepReport) -> None:
        """Learn from a step."""
        self._acceptance.observe(report.emissions, report.depth)
        self._timed = report.seconds is not None
        if not report.seconds:
            return
        slots = slots_for(report.slots)
        if self._last != (slots, report.depth):
            self._last = slots, report.depth
            self._recent.clear()
        self._recent.append(report.seconds)
        if len(self._recent) >= ALIKE:
            key = slots, bucket_of(report.context)
            cell = self._cells.setdefault(key, self._cell(key))
            in_use = slots in self._sizes and report.depth == self._sizes[slots].depth
            cell.time(report.depth, median(self._recent), self._step, in_use=in_use)

    def _cell(self, key: Key) -> Cell:
        """The cell, at first a copy of the nearest. Other contexts are nearer than other slots."""
        slots, bucket = key
        if key not in self._cells and self._cells:
            bits = slots.bit_length()
            far = {(s, b): (abs(s.bit_length() - bits), abs(b - bucket)) for s, b in self._cells}
            nearest = min(far, key=far.__getitem__)
            near = self._cells[nearest]
            timed = dict(near.timed) if nearest[0] == slots else {}
            self._cells[key] = Cell(near.unit, dict(near.costs), timed)
        return self._cells.get(key) or Cell()

    def _begin(
        self,
        size: _Size,
        cell: Cell,
        current: int,
        speeds: Mapping[int, float],
        costs: Mapping[int, float],
    ) -> None:
        """Begin a probe of an unknown depth that may win, or a due one that is paid for."""
        unknown = cell.unknown(speeds, costs)
        if unknown is not None:
            size.probed, size.left, size.wait = unknown, PROBE + 1, 0
        if size.left or size.wait < INTERVAL:
            return
        urgency, prices = dict[int, float](), dict[int, float]()
        for depth in speeds.keys() - {current}:
            share = min(speeds[depth] / speeds[current], 1.0)
            step, unit = cell.timed.get(depth, (0, math.inf))
            doubtful = abs(cell.unit / unit - 1) > JUMP
            price = 1 + PROBE * costs[depth] / costs[current] * (1 - share)
            price = 1.0 if doubtful else min(price, SAVED)
            if self._saved + SAVED * doubtful >= price:
                urgency[depth] = 1e9 * doubtful + (self._step - step) * share
                prices[depth] = price
        if urgency:
            size.probed = max(urgency, key=urgency.__getitem__)
            size.left, size.wait = PROBE, 0
            self._saved -= prices[size.probed]

    def _decide(self, depth: int, reason: str) -> Decision:
        depths = {row_id: min(k, depth) for row_id, k in self._limits.items()} if depth else {}
        return Decision(max(depths.values(), default=0), depths, reason)
