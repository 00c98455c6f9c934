"""A page of the caches, which rows share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Page:
    """A page that somebody has.

    Its first positions may be read by all who have it. Only the row that took it writes to it, to
    positions that nobody else reads.

    Attributes:
        index: its place in the pool. It changes when the pool shrinks.
        rows: how many rows have it.
        kept: how often it is kept for rows to come.
    """

    index: int
    rows: int = 1
    kept: int = 0
