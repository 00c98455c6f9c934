"""How many slots and pages a batch has, and which row has which.

Bodies are pages of `PAGE` positions in one pool; a row has as many as it needs, wherever they are.
The slots are a power of two and the pages of the longest row a bucket, so a batch meets few shapes.

Pure Python: positions and slots, no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from omlx_worker.engine.kernels.window import PAGE

MIN_CAPACITY = 256
"""Positions that the longest row of a batch has room for, at least."""

FIRST_LIMIT = 2048
"""Positions up to which this room doubles; above it grows by eighths of the power of two below."""


class Seat(NamedTuple):
    """Where a row is: its slot, and the pages of its body."""

    slot: int
    pages: tuple[int, ...] = ()


Tail = tuple[Seat, int, int]
"""The seat of a row, its body length and its cursor: what is between them is in the tail."""


class Layout(NamedTuple):
    """Slots, pages of the pool, and positions that any row may have."""

    slots: int = 0
    pages: int = 0
    capacity: int = 0


def capacity_for(positions: int) -> int:
    """The smallest bucket that holds ``positions``."""
    if positions <= FIRST_LIMIT:
        return max(MIN_CAPACITY, power_of_two(positions))
    step = power_of_two(positions) // 16
    return -(-positions // step) * step


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)


def unmoved(moves: Sequence[int | None], size: int) -> bool:
    """Whether every row of ``size`` slots keeps its own; ``moves`` names the row of each slot."""
    return len(moves) == size and all(old in (None, slot) for slot, old in enumerate(moves))


def layout_for(pages: Sequence[int], least: Layout | None = None) -> Layout:
    """The smallest layout for rows with so many pages each that is not below ``least``."""
    capacity = pages_for(capacity_for(max(pages, default=0) * PAGE)) * PAGE
    needed = power_of_two(len(pages)), capacity_for(sum(pages) * PAGE) // PAGE, capacity
    return Layout(*map(max, needed, least or Layout()))


def excess(layout: Layout, pages: Sequence[int]) -> int:
    """How much too large a layout is: the largest factor, less one; 0 if none is two."""
    needed = layout_for(pages)
    return max(has // max(1, needs) for has, needs in zip(layout, needed, strict=True)) - 1
