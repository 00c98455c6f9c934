"""How many prompt tokens to read between two decode steps.

A running row waits for the chunk that comes between two of its tokens, so these may come ``GAP``
times as far apart as they usually do, and decoding keeps two fifths of the time however long the
prompt; less for the few steps that draft less than usual while short prompts are read. Where nobody
watches tokens come, chunks are as long as the device bears well: Metal kills work of about five
seconds.

A chunk costs something however short it is, and something for each token, more with a longer
context before it. Both are found by measuring, each span of contexts by itself: how much longer a
step takes with a chunk before it than steps as deep do without. Where the former alone takes longer
than a step, shorter chunks would hold rows up more often and hardly less long: there a third of
what a chunk adds goes into its tokens.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field

GAP = 2.5
UNHURRIED_SECONDS = 1.0
FEWEST_TOKENS = 8
FIRST_TOKENS, FIRST_UNHURRIED_TOKENS = 16, 512
REMEMBERED_STEPS, REMEMBERED_CHUNKS = 64, 64
USUAL_STEPS = 32
FEWEST_ALIKE, MANY_ALIKE = 3, 8
# One measurement may be off: sizes are halved at most, and grow by less.
MOST_SHRINKING, MOST_GROWING = 0.5, 1.5

LAST_PIECE = 1.15
"""A prompt's rest is read at once if that takes at most this many times as long as is allowed."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk that was read since the last step."""

    context: int
    hurried: bool
    tokens: int


@dataclass(slots=True)
class _Chunks:
    """Chunks read of late in one span of contexts, and the sizes found for the next.

    Attributes:
        size: tokens of a chunk.
        longest: tokens of a prompt's last one.
        seen: tokens of each, and the seconds that it took, or added to a step if it was hurried.
        fixed: seconds that pass however short a chunk is, as found so far.
    """

    size: float
    longest: float
    seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CHUNKS))
    fixed: float | None = None

    def line(self) -> tuple[float, float]:
        """Seconds that pass however short a chunk is, and those of each of its tokens.

        A line through the medians of chunks about as long, so that what else holds a chunk up
        moves it little. Chunks of one length cannot tell the two apart: what was found before
        counts as some more observations, of chunks without a token; at first it all seems to be
        tokens.
        """
        points = self._medians()
        if self.fixed is not None:
            points.append((FEWEST_ALIKE, 0.0, self.fixed))
        count = sum(weight for weight, _, _ in points)
        tokens = sum(weight * x for weight, x, _ in points) / count
        seconds = sum(weight * y for weight, _, y in points) / count
        spread = sum(weight * (x - tokens) ** 2 for weight, x, _ in points)
        if not spread:
            return 0.0, seconds / tokens
        rise = sum(weight * (x - tokens) * (y - seconds) for weight, x, y in points)
        each = min(max(rise / spread, 0.0), seconds / tokens)
        # Rounding may take it below zero, and a price of tokens found from that with it.
        self.fixed = max(0.0, seconds - each * tokens)
        return self.fixed, each

    def may_grow(self, tokens: int, allowed: float) -> bool:
        """Whether chunks about as long were seen often enough, and were fast enough."""
        alike = [taken for other, taken in self.seen if other.bit_length() == tokens.bit_length()]
        return len(alike) >= FEWEST_ALIKE and statistics.median(alike) <= allowed

    def other_length(self) -> float | None:
        """Half of what chunks were of late, if all were about as long: that makes no line."""
        lengths = [tokens for _, tokens, _ in self._medians()]
        if len(self.seen) < MANY_ALIKE or max(lengths) >= 1.5 * min(lengths):
            return None
        return max(1.0, min(lengths) / 2)

    def _medians(self) -> list[tuple[int, float, float]]:
        """How many there are about as long as each other, their tokens and seconds."""
        alike: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        for tokens, seconds in self.seen:
            alike[tokens.bit_length()].append((tokens, seconds))
        enough = [some for some in alike.values() if len(some) >= FEWEST_ALIKE]
        if self.fixed is None:
            enough = list(alike.values())
        return [
            (
                len(some),
                statistics.fmean(tokens for tokens, _ in some),
                statistics.median(seconds for _, seconds in some),
            )
            for some in enough or alike.values()
        ]


class ChunkSize:
    """Finds chunk sizes from what chunks and steps have taken.

    Args:
        most: tokens of a chunk, at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._steps: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED_STEPS)
        )
        self._latest: deque[float] = deque(maxlen=USUAL_STEPS)
        self._depth = 0
        self._chunks: dict[tuple[bool, int], _Chunks] = {}
        self._between: list[_Chunk] = []

    def stepped(self, seconds: float | None, depth: int = 0) -> None:
        """A decode step has ended, so long after the one before.

        Args:
            seconds: None if there was none before, or something else than chunks came between.
            depth: drafts that it verified, on which its own time depends.
        """
        between, self._between = self._between, []
        if seconds is None:
            return
        self._depth = depth
        if not between:
            self._steps[depth].append(seconds)
            self._latest.append(seconds)
        elif len(between) == 1 and between[0].hurried and self._steps[depth]:
            self._learn(between[0], max(seconds - self._step, 0.0))

    @property
    def _step(self) -> float:
        """Seconds of a step as deep as the last."""
        return statistics.median(self._steps[self._depth])

    def chunk(self, context: int, hurried: bool, left: int) -> int:
        """Tokens to read now.

        Args:
            context: tokens that are in the row's cache already.
            hurried: whether rows decode whose consumers wait for tokens.
            left: tokens of the prompt that are not.
        """
        chunks = self._nearest(context, hurried)
        if left <= min(self._most, chunks.longest):
            return left
        return min(self._most, int(chunks.size))

    def read(self, context: int, hurried: bool, tokens: int, seconds: float) -> None:
        """A chunk of ``tokens`` took so long; what it adds to rows' waits is seen by `stepped`."""
        chunk = _Chunk(context, hurried, tokens)
        self._between.append(chunk)
        if not hurried:
            self._learn(chunk, seconds)

    def _learn(self, chunk: _Chunk, seconds: float) -> None:
        context, hurried, tokens = chunk.context, chunk.hurried, chunk.tokens
        before = self._nearest(context, hurried)
        chunks = self._chunks.setdefault(
            (hurried, _span(context)),
            _Chunks(before.size, before.longest, fixed=before.fixed),
        )
        chunks.seen.append((tokens, seconds))
        fixed, each = chunks.line()
        allowed = self._allowed(fixed) if hurried else UNHURRIED_SECONDS
        # The last piece of a prompt is short and fast, and says little about longer ones.
        if tokens < int(chunks.size) and seconds < allowed:
            return
        fitting = (allowed - fixed) / each if each else float("inf")
        most = MOST_GROWING * tokens if chunks.may_grow(tokens, allowed) else tokens
        fitting = min(max(fitting, MOST_SHRINKING * tokens), most)
        chunks.size = min(self._most, max(min(FEWEST_TOKENS, self._most), fitting))
        chunks.size = chunks.other_length() or chunks.size
        waited = allowed + (self._step if hurried else 0.0)
        more = (LAST_PIECE - 1) * waited / each if each else float("inf")
        chunks.longest = chunks.size + min(more, chunks.size)

    def _allowed(self, fixed: float) -> float:
        """Seconds that a hurried chunk may add to a step, where most take as long as of late."""
        usual = max(self._step, statistics.median(self._latest))
        return max((GAP - 1) * usual, 3 / 2 * fixed)

    def _nearest(self, context: int, hurried: bool) -> _Chunks:
        """Of the nearest shorter contexts; a token costs less there, but not by much."""
        for span in range(_span(context), -1, -1):
            if (hurried, span) in self._chunks:
                return self._chunks[hurried, span]
        first = min(FIRST_TOKENS if hurried else FIRST_UNHURRIED_TOKENS, self._most)
        return _Chunks(first, first)


def _span(context: int) -> int:
    """Contexts are alike whose lengths have as many binary digits; short ones are all alike."""
    return max(0, context.bit_length() - 9)
