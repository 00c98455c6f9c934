"""How many rows decode together: as many as pay.

Within a tile of a product more rows cost a step next to nothing; a tile more may cost as much as
it brings. So bulk rows begin with `FIRST_ROWS`. Once the batch has been full for a while and as
many bulk rows wait, it takes twice as many for a trial. It keeps them if they make more tokens a
second, as `DepthPolicy.compare` says. No row is stopped for a smaller batch: rows leave as they
end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omlx_producer.terminal import counted
from omlx_worker.decode.depth.policies import BatchSpeed
from omlx_worker.engine.rows.interface import FIRST_ROWS

GAIN, NOISE = 0.05, 0.025
"""What twice the rows are to make more, in tokens a second, and how far a comparison may be off."""

CHANGE, AT_ONCE = 1.0, 0.03
"""Gains that were forgone, in steps, when the batch gets smaller, and what one step adds at most:
its time may be off."""

FULL = 7 / 8
"""Share of its rows that a batch has while it counts as full: rows come and go."""

SETTLED, FIRST_TIMES = 64, 16
"""Steps that a batch is full or not before its size changes, and until its times count."""

AGAIN, SOON = 1024, 512
"""Steps until a size is tried again that did not pay, at first, and until one is thought of again
that had too few rows or did not look as if it paid."""


class BatchSize:
    """Chooses how many rows run, before each step. Other threads read its attributes.

    Args:
        compare: see `DepthPolicy.compare`.
        others: rows up to which those of other levels join whatever it costs, since
            their users wait; None for as many as there may be.

    Attributes:
        rows: up to so many, bulk rows join.
        places: up to so many, rows of other levels do: as many as ``others``, and slots that bulk
            rows have left, which cost a step as much with a row as without.
        asks: whether it depends on ``waiting`` if the batch grows.
        waiting: bulk rows that nobody has claimed. Written by the main thread.
        reason: how fast this size and another are, in words; empty before both were timed.
    """

    def __init__(
        self, compare: Callable[[Sequence[int]], list[BatchSpeed]], others: int | None = None
    ) -> None:
        self._compare, self._others = compare, others
        self._index = self._steps = self._since = self._full = 0
        self._regret = 0.0
        self._again_at: dict[int, int] = {}
        self._pause = AGAIN
        self.asks, self.waiting, self.reason = False, 0, ""
        self.limit_to(FIRST_ROWS)

    def limit_to(self, most: int) -> None:
        """Run no more rows than ``most``; called before any step."""
        sizes = (FIRST_ROWS << power for power in range(8))
        self._sizes = [*(size for size in sizes if size < most), most]
        self.rows, self.places = self._sizes[0], self._places(0)

    def step(self, joined: int, *, hurried: bool) -> None:
        """Choose before a step.

        Args:
            joined: rows that have a place in the batch.
            hurried: whether consumers wait for tokens of rows that decode.
        """
        self._steps += 1
        self._since += 1
        full = joined >= FULL * self._size
        self._full = min(max(self._full + (1 if full else -1), 0), SETTLED)
        if self._index:
            self._doubt()
        self.asks = self._full == SETTLED <= self._since and not hurried and self._may_grow()
        if self.asks and joined + self.waiting >= self._sizes[self._index + 1]:
            self._go(self._index + 1)
        self.rows = min(self._size, FIRST_ROWS) if hurried else self._size
        self.places = self._places(joined)
        if self._steps % SETTLED == 1:
            self.reason = self._told()

    @property
    def _size(self) -> int:
        return self._sizes[self._index]

    def _places(self, joined: int) -> int:
        most = self._sizes[-1]
        slots = next((size for size in self._sizes if size >= max(joined, self._size)), most)
        return max(slots, min(self._others or most, most))

    def _may_grow(self) -> bool:
        """Whether there is a larger size that is not given up for now and looks as if it paid: each
        further row is thought to cost what those cost by which this size is larger than the last.
        """
        if self._index + 1 == len(self._sizes):
            return False
        larger = self._sizes[self._index + 1]
        if self._steps < self._again_at.get(larger, 0):
            return False
        if not self._index:
            return True
        if self._regret or not (speeds := self._speeds()):
            return False
        (few, _, slow), (rows, _, fast) = speeds
        each = (rows / fast - few / slow) / (rows - few)
        if larger >= (1 + GAIN) * (rows + (larger - rows) * max(0.0, each) * fast):
            return True
        self._again_at[larger] = self._steps + SOON
        return False

    def _doubt(self) -> None:
        """Take fewer rows, if those of this size do not come or do not pay."""
        if not self._full:
            self._again_at[self._size] = self._steps + SOON
            self._go(self._index - 1)
        elif self._since >= FIRST_TIMES and (speeds := self._speeds()):
            less, now = speeds
            forgone = (1 + GAIN - NOISE) * less.tokens / now.tokens - 1
            self._regret = max(0.0, self._regret + min(forgone, AT_ONCE))
            if self._regret > CHANGE:
                self._again_at[self._size] = self._steps + self._pause
                self._pause *= 2
                self._go(self._index - 1)

    def _go(self, index: int) -> None:
        self._index, self._since, self._regret = index, 0, 0.0
        self._full, self.asks, self.waiting = SETTLED, False, 0

    def _speeds(self) -> list[BatchSpeed]:
        """Of the size before this one, and of this one."""
        return self._compare(self._sizes[self._index - 1 : self._index + 1])

    def _told(self) -> str:
        """The speeds of this size and of the nearest that was timed, the larger one first."""
        others = [*self._sizes[self._index + 1 :][:1], self._size // 2]
        for other in others:
            if other and (speeds := self._compare([self._size, other])):
                now, then = speeds
                rows = f"{counted(now.rows, 'row')} {_drafts(now)}: {now.tokens:.0f} tokens/s"
                return f"{rows}; {then.rows} {_drafts(then)}: {then.tokens:.0f}"
        return ""


def _drafts(speed: BatchSpeed) -> str:
    return f"with {counted(speed.depth, 'draft')}" if speed.depth else "without drafts"
