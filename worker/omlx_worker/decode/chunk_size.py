"""How many prompt tokens to read between two decode steps.

A running row waits for the chunk between two of its tokens: for `WORTH` times as long as for an
empty one, which waits for the step in flight. So decoding keeps its share of the time however long
the prompt is, and a chunk holds enough tokens to be worth its fixed cost. While only bulk rows
decode, nobody watches, and a chunk may take a second. Metal kills work of about five seconds.
"""

from __future__ import annotations

from omlx_worker.decode.window_cost import WindowCost

WORTH = 3.0
MOST_SECONDS = 1.0
FEWEST_TOKENS = 64  # with fewer, short prompts that come one after another have a chunk each
FIRST_TOKENS = 128


class ChunkSize:
    """Chooses chunk sizes from the times of chunks.

    Args:
        most: tokens of a chunk, at most.
        unit: every chunk ends at the next multiple of these tokens, or with its prompt; 1 for
            chunks by their times.
    """

    def __init__(self, most: int, unit: int = 1) -> None:
        self.unit = unit
        self._most = most
        self._cost = WindowCost()

    def chunk(self, context: int, hurried: bool, left: int) -> int:
        """Tokens to read now.

        Args:
            context: tokens in the row's cache.
            hurried: whether consumers wait for tokens of rows that decode.
            left: tokens to read up to the next stop, or to the prompt's end.
        """
        whole = self.whole(context, hurried)
        return min(left, whole - context % self.unit)

    def whole(self, context: int, hurried: bool) -> int:
        """Tokens of a chunk that neither a stop nor the prompt's end cuts short."""
        if self.unit > 1:
            return self.unit
        cost = self._cost.at(context)
        if cost is None:
            return min(FIRST_TOKENS, self._most)
        seconds = min(WORTH * cost.fixed, MOST_SECONDS) if hurried else MOST_SECONDS
        return min(max(int(cost.tokens(seconds)), FEWEST_TOKENS), self._most)

    def read(self, context: int, tokens: int, seconds: float) -> None:
        """A chunk of ``tokens``, padding included, was read in ``seconds``."""
        self._cost.add(context, tokens, seconds)
