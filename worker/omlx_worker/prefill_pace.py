"""How many prompt tokens to read between two decode steps.

A running row waits for the chunk that comes between two of its tokens, so a chunk, and what is
left of the step before it, may take ``STRETCH`` times as long as a decode step and no longer: a
row's tokens then come at most one step more than that apart, and decoding keeps two fifths of
the time however long the prompt. Where nobody watches tokens come, chunks are as long as the
device bears well: Metal kills work of about five seconds. What a token of a chunk costs grows with
the context before it, so sizes are found by measuring, each span of contexts by itself.
"""

from __future__ import annotations

import statistics
from collections import deque

STRETCH = 1.5
UNHURRIED_SECONDS = 1.0
FEWEST_TOKENS = 8
FIRST_TOKENS, FIRST_UNHURRIED_TOKENS = 16, 512
REMEMBERED_STEPS = 64
# One measurement may be off: sizes are halved at most, and grow by less.
MOST_SHRINKING, MOST_GROWING = 0.5, 1.5


class PrefillPace:
    """Finds chunk sizes from what chunks and steps have taken.

    Args:
        most: tokens of a chunk, at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._steps: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._sizes: dict[tuple[bool, int], float] = {}

    def stepped(self, seconds: float) -> None:
        """A decode step with nothing else before it took so long."""
        self._steps.append(seconds)

    def chunk(self, context: int, hurried: bool) -> int:
        """Tokens to read now.

        Args:
            context: tokens that are in the row's cache already.
            hurried: whether rows decode whose consumers wait for tokens.
        """
        return max(1, min(self._most, int(self._size(context, hurried))))

    def read(self, context: int, hurried: bool, tokens: int, seconds: float) -> None:
        """A chunk of ``tokens`` took so long, what was left of the step before it included."""
        size = self._size(context, hurried)
        allowed = self._allowed(hurried)
        # The last piece of a prompt is short and fast, and says little about longer ones.
        if allowed is None or (tokens < int(size) and seconds < allowed):
            return
        factor = min(MOST_GROWING, max(MOST_SHRINKING, allowed / max(seconds, 1e-9)))
        fewest = min(FEWEST_TOKENS, self._most)
        self._sizes[hurried, _span(context)] = min(self._most, max(fewest, tokens * factor))

    def _allowed(self, hurried: bool) -> float | None:
        if not hurried:
            return UNHURRIED_SECONDS
        return STRETCH * statistics.median(self._steps) if self._steps else None

    def _size(self, context: int, hurried: bool) -> float:
        """As found for the nearest shorter contexts; a token costs less there, but not by much."""
        for span in range(_span(context), -1, -1):
            if (hurried, span) in self._sizes:
                return self._sizes[hurried, span]
        return min(FIRST_TOKENS if hurried else FIRST_UNHURRIED_TOKENS, self._most)


def _span(context: int) -> int:
    """Contexts are alike whose lengths have as many binary digits; short ones are all alike."""
    return max(0, context.bit_length() - 9)
