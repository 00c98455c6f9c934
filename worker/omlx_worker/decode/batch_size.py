"""How many rows decode together: as many as the backlog fills, up to the limit.

Within a tile of a product more rows cost a step next to nothing; a tile more may cost as much as
it brings. So bulk rows begin with `FIRST_ROWS`, and twice as many run once so many run or wait. No
row is stopped for a smaller batch: rows leave as they end.
"""

from __future__ import annotations

from omlx_worker.engine.rows.interface import FIRST_ROWS


class BatchSize:
    """Chooses how many rows run, before each step. Other threads read its attributes.

    Args:
        others: rows up to which those of other levels join whatever it costs, since
            their users wait; None for as many as there may be.

    Attributes:
        rows: up to so many, bulk rows join.
        places: up to so many, rows of other levels do: as many as ``others``, and slots that bulk
            rows have left, which cost a step as much with a row as without.
        asks: whether ``held`` is looked at, since the first rows are there.
        held: rows that run or that nobody has claimed, when they were counted last. Written by the
            main thread.
    """

    def __init__(self, others: int | None = None) -> None:
        self._others = others
        self.asks, self.held = False, 0
        self.limit_to(FIRST_ROWS)

    def limit_to(self, most: int) -> None:
        """Run no more rows than ``most``; called before any step."""
        sizes = (FIRST_ROWS << power for power in range(8))
        self._sizes = [*(size for size in sizes if size < most), most]
        self.step(0, hurried=False)

    def step(self, joined: int, *, hurried: bool) -> None:
        """Choose before a step.

        Args:
            joined: rows that have a place in the batch.
            hurried: whether consumers wait for tokens of rows that decode.
        """
        first, most = self._sizes[0], self._sizes[-1]
        self.asks = first <= joined and first < most and not hurried
        if not self.asks:
            self.held = 0
        filled = max((size for size in self._sizes if size <= self.held), default=first)
        in_use = next((size for size in self._sizes if size >= joined), most)
        self.rows = first if hurried else filled
        self.places = max(filled, in_use, min(self._others or most, most))
