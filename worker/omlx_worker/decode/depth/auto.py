"""The `auto` policy: drafts as deep as yields the most tokens per second, as far as is known.

A depth K yields (rows + drafts accepted at K) / (seconds of a step at K). Seconds come from a
calibration grid where one was measured, and from the steps themselves; acceptance comes from each
row's own record, with the model's as prior. The depth changes once the gains forgone add up to
`CHANGE` steps. Now and then another depth is probed for a few steps.
"""

from __future__ import annotations

import math, os
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omlx_worker.decode.depth.records import Decision, RowView, StepReport

MARGIN, CHANGE = 0.005, 0.4
"""Share by which a depth must beat the one in use to count, and the sum of gains that changes it."""

PROBE, FIRST = 6, 4
"""Steps of a probe; timings that make a depth known."""

DEBT = 6.0
BUDGET, SAVINGS = 0.005, 10.0
"""Share of the time that probes may cost, and how much of it is saved up at most, in steps."""

INTERVAL = 48
"""Steps between probes with as many slots, at least."""

CHANGES, CATCH_UP = 1.0, 3.0
"""Price of going to another depth and back, and of the head's catching up before, in steps."""

DOUBT = 0.14
"""A depth is probed on credit once steps became slower or faster by this much (a logarithm)."""

ATTEMPTS = 6
"""Probes of a depth that never yielded enough timings; after that, guesses must do."""

GAIN, FAST_GAIN, JUMP = float(os.environ.get('GAIN','.2')), 0.5, 0.15
"""Weight of a timing of the depth in use, and of one probed or off by more than a jump."""

SURE = 16
"""Timings after which a depth in use says how all depths of its cell have changed."""

GUESS = 0.08
"""Cost of a draft where nothing is known, as a share of a step."""

ROW_MEMORY, MODEL_MEMORY = 0.985, 0.9995
"""What one more draft leaves of a record: a row's spans some 65 drafts, the model's 2,000."""

PRIOR = float(os.environ.get('PRIOR','4'))
"""Drafts that the model's record counts for in a row's."""

RATES = (0.8, 0.92)
"""Rate of a first draft before anything is known, and of each further one relative to the last."""

REFRESH = 64
"""Steps after which the expectations of all rows follow the model's record."""


def slots_for(rows: int) -> int:
    """The engine's batch sizes: powers of two."""
    return 1 << max(rows - 1, 0).bit_length()


def context_bucket(tokens: int) -> int:
    """0 up to 1,024 tokens, 1 up to 2,048, 2 up to 4,096 and so on."""
    return (max(tokens - 1, 0) // 1024).bit_length()


@dataclass(slots=True)
class _Timing:
    """A depth's cost: log seconds less the cell's shift; ``shift`` is the cell's when last timed."""

    log: float
    count: int
    shift: float
    step: int = 0


class _Cell:
    """Costs of one number of slots and context bucket. All depths move with ``shift``."""

    def __init__(self) -> None:
        self.shift = 0.0
        self.depths: dict[int, _Timing] = {}
        self._first: defaultdict[int, list[float]] = defaultdict(list)
        self._recent: deque[float] = deque(maxlen=3)
        self._last = -1

    def seconds(self, depth: int) -> float:
        return math.exp(self.depths[depth].log + self.shift)

    def put(self, depth: int, seconds: float, count: int = SURE, step: int = 0) -> None:
        self.depths[depth] = _Timing(math.log(seconds) - self.shift, count, self.shift, step)

    def observe(self, depth: int, seconds: float, in_use: bool, step: int) -> float:
        """Take in the time of a step; the median of three keeps outliers out.

        Returns:
            By how much the depth moved against the others.
        """
        if depth != self._last:
            self._last = depth
            self._recent.clear()
        known = self.depths.get(depth)
        if known is None:
            first = self._first[depth]
            first.append(seconds)
            if len(first) == FIRST:
                self.put(depth, statistics.median_low(first), FIRST, step)
            return 0.0
        self._recent.append(seconds)
        if len(self._recent) < 3:
            return 0.0
        low, off, high = (math.log(t) - self.shift - known.log for t in sorted(self._recent))
        known.count += 1
        jumps = low > JUMP or high < -JUMP
        gain = FAST_GAIN if jumps or not in_use else max(1 / known.count, GAIN)
        if not jumps:
            off = max(-JUMP, min(off, JUMP))
        known.step = step
        if in_use and known.count > SURE:
            self.shift += gain * off
            known.shift = self.shift
            return 0.0
        known.log += gain * off
        known.shift = self.shift
        return gain * off


@dataclass(slots=True)
class _Record:
    """Drafts judged and accepted at each position; ``expected`` of 0, 1, ... drafts."""

    tries: list[float]
    hits: list[float]
    limit: int
    expected: list[float] = field(default_factory=list)
    news: int = 0

    def add(self, drafted: int, accepted: int, memory: float) -> None:
        for position in range(min(drafted, accepted + 1, len(self.tries))):
            self.tries[position] = self.tries[position] * memory + 1
            self.hits[position] = self.hits[position] * memory + (position < accepted)


@dataclass(slots=True)
class _Size:
    """What holds for a number of slots: the depth in use, and probes."""

    depth: int = 0
    reason: str = "nothing is known yet"
    regret: float = 0.0
    wait: int = 0
    attempts: Counter[int] = field(default_factory=Counter)
    settled: bool = False


class AutoPolicy:
    """Measures what steps cost and what rows accept, and drafts as deep as pays.

    Args:
        max_depth: drafts a row and step, at most.

    Attributes:
        transitions: changes of the depth in use.
        probes: of other depths, begun so far.
    """

    def __init__(self, max_depth: int) -> None:
        self.transitions = self.probes = 0
        self._max_depth = max_depth
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)
        self._model = _Record([0.0] * max_depth, [0.0] * max_depth, max_depth)
        self._rows: dict[str, _Record] = {}
        self._limits: dict[str, int] = {}
        self._totals = [0.0] * (max_depth + 1)
        self._decisions: dict[tuple[int, str, bool], Decision] = {}
        self._probe: tuple[int, int, int] | None = None  # slots, depth, steps left
        self._credit = float(os.environ.get("CREDIT","2"))
        self._timed = True
        self._step = 0

    def choose(
        self,
        rows: Sequence[RowView],
        slots: int | None = None,
        coming: int = 0,
        *,
        reading: bool = False,
    ) -> Decision:
        self._step += 1
        limits = {row.row_id: min(row.limit, self._max_depth) for row in rows if row.limit > 0}
        if limits != self._limits or self._step % REFRESH == 0:
            self._keep(limits)
        top = max(limits.values(), default=0)
        if top == 0 or coming > len(rows):
            self._probe = None
            reason = "prompts are read" if top else "no row drafts"
            return self._decide(0, reason, passing=top > 0)
        slots = slots_for(slots or len(rows))
        cell = self._cell(slots, context_bucket(max([row.context for row in rows])), top)
        size = self._sizes[slots]
        seconds = self._seconds(slots, cell, top)
        speeds = [
            (len(rows) + self._totals[depth]) / seconds[depth] for depth in range(top + 1)
        ]
        best = speeds.index(max(speeds))
        current = min(size.depth, top)
        if not size.settled and best in cell.depths and len(cell.depths) > 1:
            size.settled, size.depth, current = True, best, best
            size.reason = f"depth {best}: the best when last measured"
        size.wait += 1
        self._credit = min(self._credit + BUDGET, SAVINGS)
        depth = self._go_on(slots, top)
        if depth is None and self._timed:
            depth = self._begin(slots, cell, current, speeds, seconds)
        if depth is not None:
            return self._decide(depth, f"measuring depth {depth}", passing=True)
        gain = speeds[best] / speeds[current] - 1
        size.regret = max(0.0, size.regret + gain - MARGIN)
        if best != current and size.regret > CHANGE:
            size.reason = f"depth {best}: {gain:+.0%} against depth {current}"
            size.depth, size.regret = best, 0.0
            if current in cell.depths and "NOLEFT" not in os.environ:
                cell.depths[current].shift = math.inf
            self.transitions += 1
            current = best
        return self._decide(current, size.reason)

    def observe(self, report: StepReport) -> None:
        """Learn from a step."""
        for row_id, drafted, accepted in report.outcomes:
            if not drafted:
                continue
            self._model.add(drafted, accepted, MODEL_MEMORY)
            record = self._rows.get(row_id)
            if record is not None:
                record.add(drafted, accepted, ROW_MEMORY)
                record.news += 1
                if 8 * record.news >= record.tries[0]:
                    self._renew(record)
        self._timed = report.seconds is not None and not report.turns
        if report.seconds is None or report.seconds <= 0 or report.changes_depth:
            return
        slots = slots_for(report.rows)
        key = (slots, context_bucket(report.context))
        cell = self._cells.setdefault(key, _Cell())
        in_use = report.depth == self._sizes[slots].depth
        moved = cell.observe(report.depth, report.seconds, in_use, self._step)
        if moved:
            for (size, _), other in self._cells.items():
                if size == slots and other is not cell and report.depth in other.depths:
                    other.depths[report.depth].log += moved
                    if not in_use:
                        other.depths[report.depth].shift = other.shift

    # Costs

    def calibrate(self, slots: int, depth: int, seconds: float) -> None:
        """Take in a cost from the calibration grid, or one that an earlier run knew."""
        self._cells.setdefault((slots, 0), _Cell()).put(depth, seconds)

    def _cell(self, slots: int, bucket: int, top: int) -> _Cell:
        cell = self._cells.setdefault((slots, bucket), _Cell())
        if len(cell.depths) <= top:
            others = [key for key in self._cells if key[0] == slots and key[1] != bucket]
            for key in sorted(others, key=lambda key: abs(key[1] - bucket)):
                other = self._cells[key]
                shared = min(cell.depths.keys() & other.depths.keys(), default=None)
                move = cell.seconds(shared) / other.seconds(shared) if shared is not None else 1.0
                for depth in other.depths.keys() - cell.depths.keys():
                    known = other.depths[depth]
                    cell.put(depth, other.seconds(depth) * move, step=known.step)
                    cell.depths[depth].shift -= other.shift - known.shift
        return cell

    def _seconds(self, slots: int, cell: _Cell, top: int) -> list[float]:
        """Seconds of a step at each depth; unknown ones follow the nearest size, or a guess."""
        known = cell.depths
        if len(known) > top:
            return [math.exp(known[d].log + cell.shift) for d in range(top + 1)]
        near = sorted(
            (key for key, other in self._cells.items() if other.depths and other is not cell),
            key=lambda key: abs(key[0].bit_length() - slots.bit_length()),
        )
        guesses = {d: cell.seconds(d) for d in known}
        for key in near:
            other = self._cells[key]
            shared = min(guesses.keys() & other.depths.keys(), default=None)
            move = guesses[shared] / other.seconds(shared) if shared is not None else 1.0
            for depth in other.depths.keys() - guesses.keys():
                guesses[depth] = other.seconds(depth) * move
        if not guesses:
            guesses[0] = 1e-3
        base = min(guesses)
        for depth in range(top + 1):
            guesses.setdefault(depth, guesses[base] * (1 + GUESS * (depth - base)))
        return [guesses[depth] for depth in range(top + 1)]

    # Probes

    def _go_on(self, slots: int, top: int) -> int | None:
        """The depth of the probe under way, if it goes on."""
        probe, self._probe = self._probe, None
        if probe is None or probe[0] != slots or probe[1] > top or probe[2] == 0:
            return None
        self._probe = (slots, probe[1], probe[2] - 1)
        return probe[1]

    def _begin(
        self, slots: int, cell: _Cell, current: int, speeds: list[float], seconds: list[float]
    ) -> int | None:
        """The depth that a probe begins to measure now, if any."""
        size, known = self._sizes[slots], cell.depths
        depth = self._unknown(size, cell, speeds, seconds)
        if depth is not None:
            size.attempts[depth] += 1
            self._probe = (slots, depth, PROBE)
        elif size.wait >= INTERVAL:
            depth = self._overdue(cell, current, speeds, seconds)
            if depth is None:
                return None
            self._probe = (slots, depth, PROBE - 1)
        else:
            return None
        size.wait = 0
        self.probes += 1
        return depth

    def _unknown(
        self, size: _Size, cell: _Cell, speeds: list[float], seconds: list[float]
    ) -> int | None:
        """The shallowest depth never measured here that could win if it cost no more than the
        shallower ones."""
        best = max((speeds[d] for d in cell.depths if d < len(speeds)), default=0.0)
        least = 0.0
        for depth, speed in enumerate(speeds):
            if depth in cell.depths:
                least = seconds[depth]
            elif size.attempts[depth] < ATTEMPTS and (
                not least or speed * seconds[depth] / least > best
            ):
                return depth
        return None

    def _overdue(
        self, cell: _Cell, current: int, speeds: list[float], seconds: list[float]
    ) -> int | None:
        prices, urgency = dict[int, float](), dict[int, float]()
        for depth, speed in enumerate(speeds):
            known = cell.depths.get(depth)
            if depth == current or known is None:
                continue
            share = min(speed / speeds[current], 1.0)
            price = PROBE * seconds[depth] / seconds[current] * (1 - share) + CHANGES
            prices[depth] = min(price + (0.0 if current else CATCH_UP), SAVINGS)
            doubtful = abs(cell.shift - known.shift) > DOUBT
            if prices[depth] <= self._credit or (doubtful and self._credit > -DEBT):
                urgency[depth] = (1e6 if doubtful else self._step - known.step) * share**4
        depth = max(urgency, key=urgency.__getitem__, default=None)
        if depth is not None:
            self._credit -= prices[depth]
        return depth

    # Acceptance

    def _keep(self, limits: dict[str, int]) -> None:
        """Make sure of these rows and forget all others."""
        self._limits, self._decisions = limits, {}
        zeros = [0.0] * self._max_depth
        self._rows = {
            row_id: self._rows.get(row_id) or _Record(list(zeros), list(zeros), limit)
            for row_id, limit in limits.items()
        }
        self._totals = [0.0] * (self._max_depth + 1)
        for record in self._rows.values():
            record.expected = []
            self._renew(record)

    def _renew(self, record: _Record) -> None:
        """Work out a row's expectations from its record and the model's."""
        before, record.news = record.expected, 0
        expected, model, rate, reach = [0.0], 1.0, 1.0, 1.0
        for position in range(self._max_depth):
            default = RATES[0] if position == 0 else model * RATES[1]
            last = model
            model = (2 * PRIOR * default + self._model.hits[position]) / (
                2 * PRIOR + self._model.tries[position]
            )
            prior = min(rate * model / max(last, 1e-6), 1.0)
            rate = (PRIOR * prior + record.hits[position]) / (PRIOR + record.tries[position])
            reach *= rate if position < record.limit else 0.0
            expected.append(expected[-1] + reach)
        record.expected = expected
        for depth, value in enumerate(expected):
            self._totals[depth] += value - (before[depth] if before else 0.0)

    # Decisions

    def _decide(self, depth: int, reason: str, *, passing: bool = False) -> Decision:
        key = (depth, reason, passing)
        if key not in self._decisions:
            depths = {row_id: min(k, depth) for row_id, k in self._limits.items()} if depth else {}
            self._decisions[key] = Decision(depth, depths, reason, passing)
        return self._decisions[key]
