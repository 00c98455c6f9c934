"""How many prompt tokens to read between two decode steps.

A running row waits for the chunk that comes between two of its tokens, so these may come ``GAP``
times as far apart as they would without, and decoding keeps two fifths of the time however long
the prompt. Where nobody watches tokens come, chunks are as long as the device bears well: Metal
kills work of about five seconds.

A chunk costs something however short it is, and something for each token, more with a longer
context before it. Both are found by measuring, each span of contexts by itself. Where the former
alone takes longer than a step, shorter chunks would hold rows up more often and hardly less long:
there a quarter of what a chunk adds goes into its tokens.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

GAP = 2.5
UNHURRIED_SECONDS = 1.0
FEWEST_TOKENS = 8
FIRST_TOKENS, FIRST_UNHURRIED_TOKENS = 16, 512
REMEMBERED_STEPS, REMEMBERED_CHUNKS = 64, 16
# One measurement may be off: sizes are halved at most, and grow by less.
MOST_SHRINKING, MOST_GROWING = 0.5, 1.5

LAST_PIECE = 1.25
"""A prompt's rest is read at once if it is at most this many times a chunk."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk that was read since the last step."""

    context: int
    hurried: bool
    tokens: int


@dataclass(slots=True)
class _Chunks:
    """Chunks read of late in one span of contexts, and the size found for the next.

    Attributes:
        seen: tokens of each, and its seconds, those of a step included if it was hurried.
        each: seconds of a token, as found so far.
    """

    size: float
    seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CHUNKS))
    each: float | None = None

    def line(self) -> tuple[float, float]:
        """Seconds that pass however short a chunk is, and those of each of its tokens.

        Chunks of one size cannot tell the two apart. What was found before counts as some more
        observations; at first it all seems to be tokens.
        """
        tokens = statistics.fmean(count for count, _ in self.seen)
        seconds = statistics.fmean(taken for _, taken in self.seen)
        known = seconds / tokens if self.each is None else self.each
        spread = tokens**2 / 4
        rise = spread * known
        for count, taken in self.seen:
            spread += (count - tokens) ** 2
            rise += (count - tokens) * (taken - seconds)
        self.each = min(max(rise / spread, 0.0), seconds / tokens)
        return seconds - self.each * tokens, self.each


class PrefillPace:
    """Finds chunk sizes from what chunks and steps have taken.

    Args:
        most: tokens of a chunk, at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._steps: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._chunks: dict[tuple[bool, int], _Chunks] = {}
        self._between: list[_Chunk] = []

    def stepped(self, seconds: float | None) -> None:
        """A decode step has ended, so long after the one before; None if there was none, or
        something else than chunks came between."""
        between, self._between = self._between, []
        if seconds is None:
            return
        if not between:
            self._steps.append(seconds)
        elif len(between) == 1 and between[0].hurried:
            self._learn(between[0], seconds)

    def chunk(self, context: int, hurried: bool, left: int) -> int:
        """Tokens to read now.

        Args:
            context: tokens that are in the row's cache already.
            hurried: whether rows decode whose consumers wait for tokens.
            left: tokens of the prompt that are not.
        """
        size = min(self._most, int(self._size(context, hurried)))
        return left if left <= min(self._most, LAST_PIECE * size) else size

    def read(self, context: int, hurried: bool, tokens: int, seconds: float) -> None:
        """A chunk of ``tokens`` took so long; what it adds to rows' waits is seen by `stepped`."""
        chunk = _Chunk(context, hurried, tokens)
        self._between.append(chunk)
        if not hurried:
            self._learn(chunk, seconds)

    def _learn(self, chunk: _Chunk, seconds: float) -> None:
        context, hurried, tokens = chunk.context, chunk.hurried, chunk.tokens
        size = self._size(context, hurried)
        chunks = self._chunks.setdefault((hurried, _span(context)), _Chunks(size))
        chunks.seen.append((tokens, seconds))
        fixed, each = chunks.line()
        allowed = self._allowed(hurried, fixed)
        # The last piece of a prompt is short and fast, and says little about longer ones.
        if allowed is None or (tokens < int(size) and seconds < allowed):
            return
        fitting = (allowed - fixed) / each if each else float("inf")
        fewest = min(FEWEST_TOKENS, self._most)
        fitting = min(max(fitting, MOST_SHRINKING * tokens), MOST_GROWING * tokens)
        chunks.size = min(self._most, max(fewest, fitting))

    def _allowed(self, hurried: bool, fixed: float) -> float | None:
        """Seconds that a chunk may take, or a step and a hurried chunk, if that is known."""
        if not hurried:
            return UNHURRIED_SECONDS
        if not self._steps:
            return None
        step = statistics.median(self._steps)
        return max(GAP * step, step + 4 / 3 * (fixed - step))

    def _size(self, context: int, hurried: bool) -> float:
        """As found for the nearest shorter contexts; a token costs less there, but not by much."""
        for span in range(_span(context), -1, -1):
            if (hurried, span) in self._chunks:
                return self._chunks[hurried, span].size
        return min(FIRST_TOKENS if hurried else FIRST_UNHURRIED_TOKENS, self._most)


def _span(context: int) -> int:
    """Contexts are alike whose lengths have as many binary digits; short ones are all alike."""
    return max(0, context.bit_length() - 9)
