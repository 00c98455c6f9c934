"""How many prompt tokens to read between two decode steps.

A running row waits for the chunk between two of its tokens. With a chunk, tokens may come ``GAP``
times as far apart as usual, so decoding keeps two fifths of the time however long the prompt is.
While only bulk rows decode, nobody watches, and a chunk may take a second. Metal kills work of
about five seconds.

A chunk costs a fixed time plus a time per token, which grows with the context before it. Both are
measured, each range of contexts by itself: how much longer a step takes with a chunk before it
than an equally deep step does alone. Where the fixed time exceeds a step, shorter chunks would
interrupt decoding more often and hardly for less time. There a third of the added time goes into
tokens.
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
# One measurement may be off: a size is halved at most, and grows by half at most.
MOST_SHRINKING, MOST_GROWING = 0.5, 1.5

LAST_PIECE = 1.15
"""The rest of a prompt is read at once if that takes at most this times the allowed time."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk read since the last step."""

    context: int
    hurried: bool
    tokens: int


@dataclass(slots=True)
class _Chunks:
    """Recent chunks in one range of contexts, and the sizes of the next.

    Attributes:
        size: tokens of a chunk.
        longest: tokens of a prompt's last chunk, at most.
        seen: tokens and seconds of each: what it took, or added to a step if it was hurried.
        fixed: seconds that a chunk takes however short it is; None before it is estimated.
    """

    size: float
    longest: float
    seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CHUNKS))
    fixed: float | None = None

    def line(self) -> tuple[float, float]:
        """Fixed seconds of a chunk, and seconds per token.

        A line through the medians of chunks of similar length, so an outlier moves it little.
        Chunks of one length cannot tell the two apart. The earlier estimate then counts as
        observations of empty chunks; without one, all time is attributed to tokens.
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
        # Rounding may take it below zero, and the time per token with it.
        self.fixed = max(0.0, seconds - each * tokens)
        return self.fixed, each

    def may_grow(self, tokens: int, allowed: float) -> bool:
        """Whether enough chunks of similar length were seen, and were fast enough."""
        alike = [taken for other, taken in self.seen if other.bit_length() == tokens.bit_length()]
        return len(alike) >= FEWEST_ALIKE and statistics.median(alike) <= allowed

    def other_length(self) -> float | None:
        """Half the recent length if all chunks were similar: one length makes no line."""
        lengths = [tokens for _, tokens, _ in self._medians()]
        if len(self.seen) < MANY_ALIKE or max(lengths) >= 1.5 * min(lengths):
            return None
        return max(1.0, min(lengths) / 2)

    def _medians(self) -> list[tuple[int, float, float]]:
        """Chunks grouped by similar length: how many, mean tokens, median seconds."""
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
    """Chooses chunk sizes from the times of chunks and steps.

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
        """A decode step has ended.

        Args:
            seconds: since the one before; None if something other than chunks took time.
            depth: drafts that it verified.
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
        """Seconds of a step as deep as the last one."""
        return statistics.median(self._steps[self._depth])

    def chunk(self, context: int, hurried: bool, left: int) -> int:
        """Tokens to read now.

        Args:
            context: tokens in the row's cache.
            hurried: whether consumers wait for tokens of rows that decode.
            left: tokens of the prompt that are not read yet.
        """
        chunks = self._nearest(context, hurried)
        if left <= min(self._most, chunks.longest):
            return left
        return min(self._most, int(chunks.size))

    def read(self, context: int, hurried: bool, tokens: int, seconds: float) -> None:
        """A chunk was read in ``seconds``; what it adds to a step is measured by `stepped`."""
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
        # The last chunk of a prompt is short and says little about longer ones.
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
        """Seconds that a hurried chunk may add to a step of the usual length."""
        usual = max(self._step, statistics.median(self._latest))
        return max((GAP - 1) * usual, 3 / 2 * fixed)

    def _nearest(self, context: int, hurried: bool) -> _Chunks:
        """The figures of this range of contexts, or of the nearest shorter one."""
        for span in range(_span(context), -1, -1):
            if (hurried, span) in self._chunks:
                return self._chunks[hurried, span]
        first = min(FIRST_TOKENS if hurried else FIRST_UNHURRIED_TOKENS, self._most)
        return _Chunks(first, first)


def _span(context: int) -> int:
    """Number of a range of contexts: ranges double in length, and the first holds 511 tokens."""
    return max(0, context.bit_length() - 9)
