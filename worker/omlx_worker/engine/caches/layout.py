"""How many slots and pages a batch has, and which row has which.

Bodies are pages of `PAGE` positions in one pool; a row has as many as it needs, wherever they are.
Rows that begin alike have the same pages.
The slots are a power of two; all pages, and those of the longest row, are a bucket: so a batch
meets few shapes.

Pure Python: positions and slots, no arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from omlx_worker.engine.kernels.window import PAGE
from omlx_worker.engine.rows.page import Page

MIN_CAPACITY = 256
"""Positions that the longest row of a window of prompts has room for, at least."""

FIRST_LIMIT = 2048
"""Positions up to which this room doubles; above it grows by eighths of the power of two below."""


_FEWEST, _SHORT, _DOUBLED = 4, 8, 128
"""Pages of a pool, and of a row in the table, at least; pages of a short row; pages up to which
buckets double. Above they grow by quarters of the power of two below. Every bucket is a trace."""


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


EMPTY = Layout()
"""Of a batch without rows."""


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


def layout_for(rows: int, pages: int, longest: int, least: Layout = EMPTY) -> Layout:
    """The smallest layout that is not below ``least``.

    Args:
        pages: of all rows, with slots and without.
        longest: pages of the longest row.
    """
    slots = max(power_of_two(rows), least.slots)
    each = max(pages_in(longest), least.capacity // PAGE)
    # So the pool of short rows depends on their slots alone.
    pool = pages_in(max(pages, slots * min(each, _SHORT)))
    return Layout(slots, max(pool, least.pages), each * PAGE)


def pages_in(pages: int) -> int:
    """The smallest bucket with room for ``pages``."""
    if pages <= _DOUBLED:
        return power_of_two(max(pages, _FEWEST))
    step = power_of_two(pages) // 8
    return -(-pages // step) * step


def excess(layout: Layout, needed: Layout) -> int:
    """How much too large a layout is: the largest factor, less one; 0 if none is two."""
    return max(has // max(1, needs) for has, needs in zip(layout, needed, strict=True)) - 1


class Pages:
    """The pages of a pool, and how many have each.

    Args:
        size: how many there are.
        positions: of each.

    Attributes:
        used: how many of them anybody has.
        alone: of these, how many no row has.
        saved: how many more rows would have if no two of them shared a page.
    """

    def __init__(self, size: int = 0, positions: int = PAGE) -> None:
        self.positions = positions
        self._pages: list[Page | None] = [None] * size
        self.used = self.alone = self.saved = 0

    @property
    def size(self) -> int:
        return len(self._pages)

    def take(self, count: int) -> list[Page]:
        """The first free pages, for a row; raises ValueError if fewer are free."""
        free = [index for index, page in enumerate(self._pages) if page is None][: max(0, count)]
        if len(free) < count:
            raise ValueError(f"{len(free)} of {count} pages are free")
        taken = [Page(index) for index in free]
        for page in taken:
            self._pages[page.index] = page
        self.used += len(taken)
        return taken

    def lend(self, pages: Sequence[Page]) -> list[Page]:
        """Pages that somebody has, for one more row."""
        for page in pages:
            self.alone -= not page.rows
            self.saved += page.rows > 0
            page.rows += 1
        return list(pages)

    def release(self, pages: list[Page]) -> None:
        """Take a row's pages back, and empty their list."""
        for page in pages:
            page.rows -= 1
            self.saved -= page.rows > 0
            self.alone += not page.rows
            self._free(page)
        pages.clear()

    def keep(self, pages: Sequence[Page]) -> None:
        """Keep a row's pages for rows to come."""
        for page in pages:
            page.kept += 1

    def drop(self, pages: Sequence[Page]) -> None:
        """Keep pages no longer."""
        for page in pages:
            page.kept -= 1
            self._free(page)

    def _free(self, page: Page) -> None:
        if not page.rows and not page.kept:
            self._pages[page.index] = None
            self.used -= 1
            self.alone -= 1

    def miscounted(self, rows: Iterable[Page], kept: Iterable[Page]) -> int:
        """How many pages are not what they are counted as; 0 unless there is a fault.

        Args:
            rows: the pages of every row, one row's after the other's.
            kept: likewise those that are kept.
        """
        places = {page: index for index, page in enumerate(self._pages) if page}
        had, keeps = Counter(rows), Counter(kept)
        wrong = sum(
            (page.rows, page.kept, page.index) != (had[page], keeps[page], places.get(page))
            or not (had[page] or keeps[page])
            for page in {*places, *had, *keeps}
        )
        used, alone = len(places), sum(not had[page] for page in places)
        sums = used, alone, had.total() - (used - alone)
        return wrong or int(sums != (self.used, self.alone, self.saved))

    def resize(self, size: int) -> list[int]:
        """Change the size, to no less than `used`.

        Returns:
            The indices of the pages to begin with, in their new order. The others are free.
        """
        kept = [page for page in self._pages if page is not None or size >= self.size]
        before = [page.index if page else index for index, page in enumerate(kept)]
        self._pages = [*kept, *[None] * (size - len(kept))]
        for index, page in enumerate(self._pages):
            if page is not None:
                page.index = index
        return before


def indices(pages: Iterable[Page]) -> tuple[int, ...]:
    return tuple(page.index for page in pages)
