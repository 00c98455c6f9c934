"""What a decode step costs, by rows, draft depth and context: measured, or guessed from that.

On a GPU the cost of a window is a staircase (an M3 Max runs a 4-bit product over 10 tokens as
fast as over 32, and over 33 twice as slowly), so no formula is fitted: every key has its own
average. Keys never measured borrow the shape of the nearest ones that were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omlx_worker.decode.depth.joint_costs import JointCosts

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


class StepCosts:
    """Seconds of a step; every `Cell` knows the depths seen in it."""

    def __init__(self) -> None:
        self._cells: dict[Cell, JointCosts] = {}
        self._found: dict[Cell, dict[int, float]] = {}

    def observe(self, cell: Cell, depth: int, seconds: float) -> None:
        """Take in a step that verified and drafted equally deep."""
        if seconds > 0:
            self._found.clear()
            self._cells.setdefault(cell, JointCosts()).observe(depth, seconds)

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
        return self._cells[cell].known if cell in self._cells else {}

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
            [*cell, depth, seconds]
            for cell, costs in self._cells.items()
            for depth, seconds in costs.known.items()
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
            cell = (int(slots), int(context))
            costs._cells.setdefault(cell, JointCosts()).recall(int(depth), float(mean))
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
