"""How long steps take, by slots, context and depth."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import dist
from statistics import median

MOST, LEAST = 7, 5  # steps in a row whose median counts

Cell = tuple[int, int]


def cell_of(slots: int, context: int) -> Cell:
    """Slots up to 1, 2, 4, 8, and so on; contexts up to 1,024 tokens, 2,048, 4,096 and so on."""
    return max(slots - 1, 0).bit_length(), (max(context - 1, 0) // 1024).bit_length()


class StepTimes:
    """Seconds of a step in each cell at each depth: the median of the last ones."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=MOST)
        self._last: tuple[Cell, int] | None = None
        self._known: dict[Cell, dict[int, float]] = {}  # the depth that was timed last is the last

    def add(self, cell: Cell, depth: int, seconds: float) -> None:
        """Take in the seconds of a step at this depth."""
        if self._last != (cell, depth):
            self._last = cell, depth
            self._recent.clear()
        self._recent.append(seconds)
        if len(self._recent) >= LEAST:
            others = {other: t for other, t in self._nearest(cell).items() if other != depth}
            self._known[cell] = others | {depth: median(self._recent)}

    def at(self, cell: Cell, depths: Iterable[int]) -> dict[int, float]:
        """Seconds at each of these depths, first of that which was timed longest ago or never.

        What is unknown is guessed low, so that it is tried where it might pay: on the line between
        the depths around it, where a window of no tokens takes no time, or like the deepest known.
        """
        known = self._nearest(cell)
        points, guesses = {-1: 0.0} | (known or {0: 1.0}), {}
        for depth in set(depths) - known.keys():
            below = max(point for point in points if point <= depth)
            above = min((point for point in points if point >= depth), default=below)
            slope = (points[above] - points[below]) / max(above - below, 1)
            guesses[depth] = points[below] + slope * (depth - below)
        return guesses | {depth: time for depth, time in known.items() if depth in depths}

    def _nearest(self, cell: Cell) -> dict[int, float]:
        """What is known of this cell, or of the nearest."""
        if cell in self._known or not self._known:
            return self._known.get(cell, {})
        return self._known[min(self._known, key=lambda other: dist(other, cell))]
