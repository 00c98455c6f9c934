"""What a decode step costs, by rows, draft depth and context: measured, or guessed from that.

On a GPU the cost of a window is a staircase (an M3 Max runs a 4-bit product over 10 tokens as
fast as over 32, and over 33 twice as slowly), so no formula is fitted: every key has its own
average. Keys never measured borrow the shape of the nearest ones that were.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FIRST, MOST_FIRST = 3, 12
"""Observations of a key that make it known, if they agree, and that do if they never agree; their
mean, without the largest, is where its average starts."""

AGREEMENT = 0.06
"""The standard error of that mean, as a share of it, at which observations agree."""

GAIN = 0.08
"""Weight of one more observation in an average that has settled."""

CLIP = 0.25
"""The most that one observation may differ from its average and count in full, as a share."""

STRAY = 1.3
"""The factor by which an observation is off that noise seldom explains, and not thrice in a row."""

STEADY = 12
"""Steps in a row of one depth after which its drift is taken to be everybody's, until another
depth has been in use as long: what a trial finds, a long one too, is news of that depth alone."""

SETTLED = 16
"""Observations of a key after which its average moves with the machine, not away from its start."""

TRUSTED = 4
"""Observations that the mean of a depth counts for that was not in use of late."""

GUESS = 0.08
"""What one more draft costs where nothing is known, as a share of a step."""

Cell = tuple[int, int]
"""Slots, and bucket of the context."""


def slots_for(rows: int) -> int:
    """The engine's batch sizes: powers of two."""
    return 1 << max(rows - 1, 0).bit_length()


def context_bucket(tokens: int) -> int:
    """0 up to 1,024 tokens, 1 up to 2,048, 2 up to 4,096 and so on."""
    return (max(tokens - 1, 0) // 1024).bit_length()


@dataclass(slots=True)
class Average:
    """Seconds of one kind of step, deaf to outliers.

    Attributes:
        first: the observations that it starts from.
        strays: the last observations, as long as all of them were off by more than `STRAY`.
        compiled: whether the first ever was seen, which includes compiling and does not count.
        is_known: whether those that it starts from are enough.
    """

    mean: float = 0.0
    count: int = 0
    first: list[float] = field(default_factory=list)
    strays: list[float] = field(default_factory=list)
    compiled: bool = False
    is_known: bool = False

    def add(self, seconds: float, steady: bool = False) -> float:
        """Take an observation in; returns by how much the mean moved.

        Args:
            steady: whether this kind of step has been in use for a while. If not, the mean may be
                from another time, and `FIRST` strays in a row that agree replace it.
        """
        if not self.compiled:
            self.compiled = True
            return 0.0
        before = self.mean
        self.count += 1
        if not self.is_known:
            self.first.append(seconds)
            self.mean = statistics.fmean(_usual(self.first))
            self.is_known = len(self.first) == MOST_FIRST or _agree(self.first)
            return self.mean - before if self.count > 1 else 0.0
        is_stray = not self.mean / STRAY <= seconds <= self.mean * STRAY
        self.strays = [*self.strays, seconds][-FIRST:] if is_stray and not steady else []
        if _agree(self.strays):
            self.mean, self.count, self.strays = statistics.median(self.strays), FIRST, []
        else:
            error = min(max(seconds / self.mean - 1, -CLIP), CLIP)
            self.mean *= 1 + max(GAIN, 1 / self.count) * error
        return self.mean - before


def _usual(seconds: Sequence[float]) -> Sequence[float]:
    """Without the largest, which may be anything."""
    return sorted(seconds)[: max(1, len(seconds) - 1)]


def _agree(seconds: Sequence[float]) -> bool:
    """Whether the mean of what is usual is known well enough."""
    if len(seconds) < FIRST:
        return False
    usual = _usual(seconds)
    error = statistics.stdev(usual) / math.sqrt(len(usual))
    return error <= AGREEMENT * statistics.fmean(usual)


class StepCosts:
    """Seconds of a step; every `Cell` holds the averages of the depths seen in it."""

    def __init__(self) -> None:
        self._cells: dict[Cell, dict[int, Average]] = {}
        self._found: dict[Cell, dict[int, float]] = {}
        self._home: dict[Cell, int] = {}
        self._depth = -1
        self._run = 0

    def observe(self, cell: Cell, depth: int, seconds: float) -> None:
        """Take in a step that verified and drafted equally deep."""
        if seconds <= 0:
            return
        self._found.clear()
        averages = self._cells.setdefault(cell, {})
        average = averages.setdefault(depth, Average())
        self._run = self._run + 1 if depth == self._depth else 1
        self._depth = depth
        if self._run > STEADY:
            self._home[cell] = depth
        at_home = self._home.get(cell) == depth
        if self._run == 1 and not at_home:
            # Its mean has only followed another depth's since it was in use.
            average.count = min(average.count, TRUSTED)
        before = average.mean
        moved = average.add(seconds, steady=at_home)
        if at_home and average.count > SETTLED:
            # A growing context adds to every depth, another user of the machine takes a share of
            # each or of some: others move by the smaller of the two. What seems too fast by that
            # is tried and found out; what seems too slow would not be.
            for other_depth, other in averages.items():
                if other_depth != depth and other.count:
                    other.mean += moved * min(other.mean / before, 1.0)

    def known(self, cell: Cell) -> set[int]:
        """The depths measured with so many slots, in contexts that compare with this one."""
        return set(self._same_slots(cell))

    def estimate(self, cell: Cell, depths: int) -> list[float]:
        """Seconds of a step at each depth from 0 to ``depths``, comparable with one another."""
        known = self._same_slots(cell)
        if not known:
            known = self._other_slots(cell)
        elif len(known) <= depths:
            # Better a figure from another context as it stands than none.
            for other in self._neighbours(cell):
                known = {**self._known(other), **known}
        return [_between(known, depth) for depth in range(depths + 1)]

    def _known(self, cell: Cell) -> dict[int, float]:
        averages = self._cells.get(cell, {})
        return {depth: average.mean for depth, average in averages.items() if average.is_known}

    def _neighbours(self, cell: Cell) -> list[Cell]:
        """Cells with as many slots, the nearest context first."""
        others = [other for other in self._cells if other[0] == cell[0] and other != cell]
        return sorted(others, key=lambda other: abs(other[1] - cell[1]))

    def _same_slots(self, cell: Cell) -> dict[int, float]:
        """Known depths, those of other contexts moved by as much as a depth known in both."""
        if cell not in self._found:
            self._found[cell] = self._find(cell)
        return self._found[cell]

    def _find(self, cell: Cell) -> dict[int, float]:
        known = self._known(cell)
        for other in self._neighbours(cell):
            theirs = self._known(other)
            shared = theirs.keys() & known.keys()
            if not known:
                known = theirs
            elif shared:
                for depth in theirs.keys() - shared:
                    nearest = min(shared, key=lambda candidate: abs(candidate - depth))
                    moved = theirs[depth] + known[nearest] - theirs[nearest]
                    known[depth] = max(moved, 0.1 * theirs[depth])
        return known

    def _other_slots(self, cell: Cell) -> dict[int, float]:
        """What the nearest size knows, in the context of which it knows most."""
        slots, context = cell
        others = sorted(
            self._cells,
            key=lambda other: (
                abs(other[0].bit_length() - slots.bit_length()),
                abs(other[1] - context),
            ),
        )
        return next((known for other in others if (known := self._same_slots(other))), {})

    def to_json(self) -> list[list[float]]:
        return [
            [*cell, depth, average.mean]
            for cell, averages in self._cells.items()
            for depth, average in averages.items()
            if average.is_known
        ]

    @classmethod
    def from_json(cls, entries: Sequence[Any]) -> StepCosts:
        """
        Raises:
            ValueError, TypeError: the entries are not what `to_json` makes.
        """
        costs = cls()
        for slots, context, depth, mean in entries:
            if not (slots >= 1 and context >= 0 and depth >= 0 and 0 < mean < float("inf")):
                raise ValueError(f"no step costs {mean!r} seconds")
            # Known, but soon outweighed: the machine may do other things today.
            average = Average(float(mean), FIRST, is_known=True)
            costs._cells.setdefault((int(slots), int(context)), {})[int(depth)] = average
        return costs


def _between(known: dict[int, float], depth: int) -> float:
    """A depth's cost on the line through its known neighbours; never less than a shallower one."""
    if depth in known:
        return known[depth]
    below = max((other for other in known if other < depth), default=None)
    above = min((other for other in known if other > depth), default=None)
    if below is not None and above is not None:
        share = (depth - below) / (above - below)
        return known[below] + share * max(known[above] - known[below], 0.0)
    if below is not None:
        second = max((other for other in known if other < below), default=None)
        rise = GUESS * known[below]
        if second is not None:
            rise = max((known[below] - known[second]) / (below - second), 0.0)
        return known[below] + rise * (depth - below)
    if above is not None:
        return known[above] / (1 + GUESS * (above - depth))
    return 1 + GUESS * depth
