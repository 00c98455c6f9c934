"""How many prompt tokens to read between two decode steps.

A running row waits for the chunk between two of its tokens. With a chunk, tokens may come ``GAP``
times as far apart as usual, so decoding keeps two fifths of the time however long the prompt is.
While only bulk rows decode, nobody watches, and a chunk may take a second. Metal kills work of
about five seconds.

A size is corrected by what the last chunk took, each range of contexts by itself.
"""

from __future__ import annotations

from collections import deque
from statistics import median

GAP = 2.5
UNHURRIED_SECONDS = 1.0
FEWEST_TOKENS = 16  # a product over fewer takes a GPU about as long
FIRST_UNHURRIED_TOKENS = 512
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
        self._sizes: dict[tuple[bool, int], float] = {}
        self._steps: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_STEPS)
        self._between: list[tuple[int, bool, int]] = []

    def chunk(self, context: int, hurried: bool, left: int) -> int:
        """Tokens to read now.

        Args:
            context: tokens in the row's cache.
            hurried: whether consumers wait for tokens of rows that decode.
            left: tokens to read up to the next stop, or to the prompt's end.
        """
        if self.unit > 1:
            return min(left, self.unit - context % self.unit)
        size = self._size(context, hurried)
        return left if left <= min(self._most, LAST_PIECE * size) else int(size)

    def whole(self, context: int, hurried: bool) -> int:
        """Tokens of a chunk that neither a stop nor the prompt's end cuts short."""
        return int(self._size(context, hurried))

    def read(self, context: int, hurried: bool, tokens: int, seconds: float) -> None:
        """A chunk of ``tokens``, padding included, was read in ``seconds``.

        How long a hurried one keeps rows waiting is told by `stepped`.
        """
        self._between.append((context, hurried, tokens))
        if not hurried:
            self._correct(context, hurried, tokens, UNHURRIED_SECONDS / max(seconds, 1e-9))

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
        alike = [alone for other, alone in self._steps if other == depth]
        if len(between) == 1 and between[0][1] and alike:
            step = median(alike)
            usual = max(step, median(alone for _, alone in self._steps))
            self._correct(*between[0], (GAP - 1) * usual / max(seconds - step, 1e-9))

    def _correct(self, context: int, hurried: bool, tokens: int, ratio: float) -> None:
        """Learn that a chunk of ``tokens`` could have taken ``ratio`` times as long as it did."""
        size, ratio = self._size(context, hurried), min(max(ratio, 0.5), 2.0)
        # The last chunk of a prompt is short, so its being fast says little about longer ones.
        size = ratio * size if ratio < 1 else max(size, ratio * tokens)
        size = min(max(size, FEWEST_TOKENS), self._most)
        self._sizes[hurried, _span(context)] = size

    def _size(self, context: int, hurried: bool) -> float:
        """The size in this range of contexts, or in the nearest shorter one that is known."""
        if self.unit > 1:
            return self.unit
        for span in range(_span(context), -1, -1):
            if (hurried, span) in self._sizes:
                return self._sizes[hurried, span]
        return min(FEWEST_TOKENS if hurried else FIRST_UNHURRIED_TOKENS, self._most)


def _span(context: int) -> int:
    """Number of a range of contexts: ranges double in length, and the first holds 511 tokens."""
    return max(0, context.bit_length() - 9)
