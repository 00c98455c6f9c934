"""The `auto` policy: drafts as deep as yields the most tokens per second, as far as is known.

A depth K yields (rows + drafts accepted at K) / (seconds of a step at K). Seconds are those of the
calibration grid, refreshed by steps; acceptance is each row's own, with the model's as prior. The
depth changes once the gains forgone add up to `CHANGE` steps. Now and then another is probed.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from omlx_worker.decode.depth.acceptance import Acceptance
from omlx_worker.decode.depth.records import Decision, RowView, StepReport, bucket_of, slots_for

# Durations are in steps, shares are of the depth in use.
MARGIN, CHANGE = 0.005, 0.4  # gains that count, and the sum of them that changes the depth
PROBE, ALIKE = 6, 3  # steps of a probe; timings of one depth in a row whose median counts
INTERVAL = 48  # between probes with as many slots, at least
BUDGET = 0.005  # share of the time that probes may cost
SAVINGS, DEBT = 10.0, 6.0  # the most that is saved for probes, or owed
OVERHEAD = 1.0  # price of a probe besides its steps, in steps
GAIN, FAST_GAIN = 0.2, 0.5  # weight of a timing in use, and of one that is probed or jumps
JUMP = 0.15  # log change of a cost that is no noise; other depths are then probed on credit
SURE = 16  # timings after which the depth in use moves all depths of its cell
GUESS = 0.08  # cost of a draft where nothing is known


@dataclass(slots=True)
class _Cost:
    """A depth's log seconds less its cell's shift, and the cell's shift and step when timed."""

    log: float
    shift: float
    count: int = SURE
    step: int = 0


class Cell:
    """Costs at one number of slots and context bucket. All depths move with ``shift``."""

    def __init__(self) -> None:
        self.shift = 0.0
        self.depths: dict[int, _Cost] = {}
        self._last, self._recent = -1, deque[float](maxlen=ALIKE)

    def seconds(self, depth: int) -> float:
        return math.exp(self.depths[depth].log + self.shift)

    def put(self, depth: int, seconds: float, *, in_doubt: bool = False) -> None:
        shift = math.inf if in_doubt else self.shift
        self.depths[depth] = _Cost(math.log(seconds) - self.shift, shift)

    def observe(self, depth: int, seconds: float, step: int, *, in_use: bool) -> None:
        """Learn from the median of the last three timings; three that agree may be a jump."""
        if depth != self._last:
            self._last, self._recent = depth, deque(maxlen=ALIKE)
        self._recent.append(math.log(seconds))
        if len(self._recent) < ALIKE:
            return
        low, middle, high = (log - self.shift for log in sorted(self._recent))
        cost = self.depths.setdefault(depth, _Cost(middle, self.shift, ALIKE))
        cost.step, cost.count = step, cost.count + 1
        jumps = low - cost.log > JUMP or high - cost.log < -JUMP
        gain = FAST_GAIN if jumps or not in_use else max(1 / cost.count, GAIN)
        off = middle - cost.log if jumps else max(-JUMP, min(middle - cost.log, JUMP))
        if in_use and cost.count > SURE:
            self.shift += gain * off
        else:
            cost.log += gain * off
        cost.shift = self.shift


@dataclass(slots=True)
class _Size:
    """State at one number of slots: depth in use, gains forgone, steps since a probe, the probe."""

    depth: int | None = None
    reason: str = "nothing is known yet"
    regret: float = 0.0
    wait: int = 0
    probed: int = 0
    left: int = 0


class AutoPolicy:
    """Drafts as deep as pays.

    Args:
        max_depth: drafts a row and step, at most.
        own_depth: of those that the model makes itself; the others are looked up. None for all.

    Attributes:
        cells: costs by slots and context bucket.
    """

    def __init__(self, max_depth: int, own_depth: int | None = None) -> None:
        self.max_depth = max_depth
        self.own_depth = max_depth if own_depth is None else own_depth
        # Between the deepest of its own and the deepest at all one more will do.
        self.depths = sorted({*range(self.own_depth + 1), max_depth // 2, max_depth})
        self.acceptance = Acceptance(max_depth, self.own_depth)
        self.cells: defaultdict[tuple[int, int], Cell] = defaultdict(Cell)
        self._sizes = defaultdict[int, _Size](_Size)
        self._limits: dict[str, int] = {}
        self._decisions: dict[tuple[int, str, bool], Decision] = {}
        self._credit, self._timed, self._step = OVERHEAD + 1.0, True, 0

    def choose(self, rows: Sequence[RowView], slots: int, coming: int = 0) -> Decision:
        """See `DepthPolicy`. No row drafts while the rows that join outnumber those that decode."""
        self._step += 1
        limits = {row.row_id: min(row.limit, self.max_depth) for row in rows if row.limit > 0}
        if limits != self._limits or self._step % INTERVAL == 0:
            self._limits, self._decisions = limits, {}
            self.acceptance.keep(limits, {row.row_id for row in rows if row.constrained})
        self.acceptance.decide()
        top = max(limits.values(), default=0)
        if top == 0 or coming > len(rows):
            return self._decide(0, "rows join" if top else "no row drafts", passing=top > 0)
        slots = slots_for(slots)
        cell, seconds = self._estimate(slots, max([row.context for row in rows]), top)
        speeds = [(len(rows) + self.acceptance.totals[k]) / seconds[k] for k in range(top + 1)]
        best = max((k for k in self.depths if k <= top), key=speeds.__getitem__)
        size = self._sizes[slots]
        if size.depth is None and best in cell.depths and len(cell.depths) > 1:
            size.depth, size.reason = best, f"depth {best}: the best when last measured"
        current = min(size.depth or 0, top)
        size.wait += 1
        self._credit = min(self._credit + BUDGET, SAVINGS)
        if not size.left and self._timed:
            self._begin(size, cell, current, speeds, seconds)
        if size.left:
            size.left -= 1
            depth = min(size.probed, top)
            return self._decide(depth, f"measuring depth {depth}", passing=True)
        gain = speeds[best] / speeds[current] - 1
        size.regret = max(0.0, size.regret + gain - MARGIN)
        if best != current and size.regret > CHANGE:
            if current in cell.depths:
                cell.depths[current].shift = math.inf  # in doubt: it may have met a bad moment
            size.reason = f"depth {best}: {gain:+.0%} against depth {current}"
            size.depth, size.regret, current = best, 0.0, best
        return self._decide(current, size.reason)

    def observe(self, report: StepReport) -> None:
        """Learn from a step."""
        self.acceptance.observe(report.emissions, report.depth)
        self._timed = report.seconds is not None
        if report.seconds:
            slots = slots_for(report.slots)
            in_use = report.depth == self._sizes[slots].depth
            cell = self.cells[slots, bucket_of(report.context)]
            cell.observe(report.depth, report.seconds, self._step, in_use=in_use)

    def _estimate(self, slots: int, context: int, top: int) -> tuple[Cell, list[float]]:
        """The cell, and seconds of a step at each depth.

        A depth unknown here costs what it does in the nearest cell that knows it, scaled by a depth
        that both know. Other contexts are nearer than other slots. Without such a cell, a guess.
        """
        bits, bucket = slots.bit_length(), bucket_of(context)
        cell = self.cells[slots, bucket]
        known = {depth: cell.seconds(depth) for depth in cell.depths}
        if any(depth not in known for depth in range(top + 1)):
            others = [(abs(s.bit_length() - bits), abs(b - bucket), s, b) for s, b in self.cells]
            for far, _, *key in sorted(others)[1:]:
                other = self.cells[key[0], key[1]]
                shared = min(known.keys() & other.depths.keys(), default=None)
                move = 1.0 if shared is None else known[shared] / other.seconds(shared)
                for depth in other.depths.keys() - known.keys():
                    known[depth] = move * other.seconds(depth)
                    if not far:
                        cell.put(depth, known[depth])
            known.setdefault(0, min(known.values(), default=1.0))
            for depth in range(1, top + 1):
                known.setdefault(depth, known[depth - 1] * (1 + GUESS))
        return cell, [known[depth] for depth in range(top + 1)]

    def _begin(
        self, size: _Size, cell: Cell, current: int, speeds: list[float], seconds: list[float]
    ) -> None:
        """Begin a probe, if one is worth it.

        First of the shallowest unknown depth that would win if it cost no more than shallower ones.
        Else, when a probe is due and paid for, of a depth in doubt or not timed for long.
        """
        least, urgency, prices = 0.0, dict[int, float](), [0.0] * len(speeds)
        best = max((speeds[k] for k in cell.depths if k < len(speeds)), default=0.0)
        for depth in (k for k in self.depths if k < len(speeds)):
            speed = speeds[depth]
            cost = cell.depths.get(depth)
            if cost is None:
                if not least or speed * seconds[depth] / least > best:
                    urgency = {depth: 0.0}
                    break
                continue
            least = seconds[depth]
            share = min(speed / speeds[current], 1.0)
            price = PROBE * seconds[depth] / seconds[current] * (1 - share) + OVERHEAD
            prices[depth] = price = min(price, SAVINGS)
            doubtful = abs(cell.shift - cost.shift) > JUMP
            paid = self._credit >= price or (doubtful and self._credit > -DEBT and price <= DEBT)
            if depth != current and paid and size.wait >= INTERVAL:
                urgency[depth] = (1e9 if doubtful else self._step - cost.step) * share**4
        if urgency:
            size.probed = max(urgency, key=urgency.__getitem__)
            size.left = PROBE + (size.probed not in cell.depths)
            self._credit -= prices[size.probed]
            size.wait = 0

    def _decide(self, depth: int, reason: str, *, passing: bool = False) -> Decision:
        key = (depth, reason, passing)
        if key not in self._decisions:
            depths = {row_id: min(k, depth) for row_id, k in self._limits.items()} if depth else {}
            self._decisions[key] = Decision(depth, depths, reason, passing)
        return self._decisions[key]
