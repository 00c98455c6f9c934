"""How many prompt tokens to read between two decode steps.

A running row waits for the chunk between two of its tokens. With a chunk, tokens may come ``GAP``
times as far apart as usual, so decoding keeps two fifths of the time however long the prompt is.
Where a chunk's fixed cost takes as long, smaller chunks would only be more of them: there a chunk
takes `WORTH` times its fixed cost. While only bulk rows decode, nobody watches, and a chunk may
take a second. Metal kills work of about five seconds.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from omlx_worker.decode.window_cost import WindowCost

GAP = 2.5
WORTH = 4.0
UNHURRIED_SECONDS = 1.0
FEWEST_TOKENS = 16  # a product over fewer takes a GPU about as long
FIRST_HURRIED_TOKENS = 32
FIRST_UNHURRIED_TOKENS = 512
FIRST_PADDING = 32
REMEMBERED_STEPS = 32
LAST_PIECE = 1.25
"""The rest before a stop or the end is read at once if it is this many times a chunk, at most."""


class ChunkSize:
    """Chooses chunk sizes from the times of chunks and steps.

    Args:
        most: tokens of a chunk, at most.
        unit: every chunk ends at the next multiple of these tokens, or with its prompt; 1 for
            chunks by their times.
    """

    def __init__(self, most: int, unit: int = 1) -> None:
        self.unit = unit
        self._most = most
        # Told by different clocks: a hurried chunk by the gap that it makes between two steps.
        self._costs = {True: WindowCost(), False: WindowCost()}
        self._steps: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_STEPS)
        self._between: list[tuple[int, bool, int, float]] = []

    def chunk(self, context: int, hurried: bool, left: int) -> int:
        """Tokens to read now.

        Args:
            context: tokens in the row's cache.
            hurried: whether consumers wait for tokens of rows that decode.
            left: tokens to read up to the next stop, or to the prompt's end.
        """
        if self.unit > 1:
            return min(left, self.unit - context % self.unit)
        size = self.whole(context, hurried)
        return left if left <= min(self._most, LAST_PIECE * size) else size

    def whole(self, context: int, hurried: bool) -> int:
        """Tokens of a chunk that neither a stop nor the prompt's end cuts short."""
        if self.unit > 1:
            return self.unit
        first = FIRST_HURRIED_TOKENS if hurried else FIRST_UNHURRIED_TOKENS
        cost = self._costs[hurried].at(context)
        if cost is None:
            return min(first, self._most)
        seconds = UNHURRIED_SECONDS
        if hurried:
            worth = 0.0 if cost.guessed else WORTH * cost.fixed
            seconds = min(seconds, max((GAP - 1) * self._step_seconds, worth))
        size = cost.tokens(seconds)
        if size == cost.most:
            size = max(size, first)
        elif cost.guessed and size < FEWEST_TOKENS:
            size = cost.most  # the only way left to tell what is fixed
        return min(max(int(size), FEWEST_TOKENS), self._most)

    def padding(self, context: int, hurried: bool) -> int:
        """Tokens of padding that take as long as a step and a chunk's fixed cost.

        With more, a row had better wait for a step and be read in a chunk of its own.
        """
        cost = self._costs[hurried].at(context)
        if cost is None:
            return FIRST_PADDING
        spared = self._step_seconds + cost.fixed
        return int(min(self._most, spared / cost.each)) if cost.each else self._most

    def steps_for(self, context: int, hurried: bool) -> float:
        """How many decode steps take as long as a chunk's fixed cost; 0 before any was timed."""
        cost, step = self._costs[hurried].at(context), self._step_seconds
        return cost.fixed / step if cost and step else 0.0

    def read(self, context: int, hurried: bool, tokens: int, seconds: float) -> None:
        """A chunk of ``tokens``, padding included, was read in ``seconds``.

        How long a hurried one keeps rows waiting is told by `stepped`.
        """
        self._between.append((context, hurried, tokens, seconds))
        if not hurried:
            self._costs[False].add(context, tokens, seconds)

    def stepped(self, seconds: float | None, depth: int = 0) -> None:
        """A decode step has ended.

        Args:
            seconds: since the one before; None if something other than chunks took time.
            depth: drafts that it verified.
        """
        between, self._between = self._between, []
        if seconds is None:
            return
        if not between:
            self._steps.append((depth, seconds))
            return
        if all(other != depth for other, _ in self._steps):
            # Under load no step may ever follow another without chunks between them.
            self._steps.append((depth, max(0.0, seconds - sum(own for *_, own in between))))
        if len(between) == 1 and between[0][1]:
            context, _, tokens, _ = between[0]
            alone = median(alone for other, alone in self._steps if other == depth)
            self._costs[True].add(context, tokens, seconds - alone)

    @property
    def _step_seconds(self) -> float:
        """What rows are used to wait between two tokens; 0 before any step was timed."""
        if not self._steps:
            return 0.0
        last, _ = self._steps[-1]
        alike = median(seconds for depth, seconds in self._steps if depth == last)
        return max(alike, median(seconds for _, seconds in self._steps))
