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

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

GAP = 2.5
UNHURRIED_SECONDS = 1.0
FEWEST_TOKENS = 8
FIRST_OVERHEAD = 32.0
FIRST_TOKENS, FIRST_UNHURRIED_TOKENS = 16, 512
REMEMBERED_STEPS, REMEMBERED_CHUNKS = 32, 64
FEWEST_ALIKE = 3
# One measurement may be off, so a size is halved at most. It doubles at most, and no less: prompts
# of about equal lengths fill a chunk of twice theirs, and none in between.
MOST_SHRINKING, MOST_GROWING = 0.5, 2.0
TELLING = 1.5
"""Chunks whose lengths are this far apart tell the fixed time from that of a token."""

LAST_PIECE = 1.15
"""What is left before a stop or the end is read at once if it takes at most this times the allowed
time."""


@dataclass(slots=True)
class _Chunks:
    """Recent chunks in one range of contexts, and the sizes of the next.

    Attributes:
        size: tokens of a chunk.
        longest: tokens of the last chunk before a stop or the end of a prompt, at most.
        fixed: seconds that a chunk takes however short it is.
        each: seconds a token beside them; 0 if not known.
        seen: tokens and seconds of each: what it took, or added to a step if it was hurried.
    """

    size: float
    longest: float
    fixed: float = 0.0
    each: float = 0.0
    seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CHUNKS))

    def estimate_fixed(self) -> bool:
        """Whether lengths differ enough to tell the fixed time from the time per token.

        Theil's incomplete method: the median slope between a short and a long chunk, over pairs,
        and the median of what it leaves. An outlier moves it little.
        """
        chunks = sorted(self.seen)
        pairs = zip(chunks, chunks[(len(chunks) + 1) // 2 :], strict=False)
        slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs if x2 >= TELLING * x1]
        if len(slopes) < FEWEST_ALIKE:
            return False
        each = max(0.0, median(slopes))
        self.fixed = max(0.0, median(seconds - each * tokens for tokens, seconds in chunks))
        return True


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
        self._latest: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._chunks: dict[tuple[bool, int], _Chunks] = {}
        self._between: list[tuple[int, bool, int]] = []

    def chunk(self, context: int, hurried: bool, left: int) -> int:
        """Tokens to read now.

        Args:
            context: tokens in the row's cache.
            hurried: whether consumers wait for tokens of rows that decode.
            left: tokens to read up to the next stop, or to the prompt's end.
        """
        chunks = self._nearest(context, hurried)
        return left if left <= min(self._most, chunks.longest) else int(chunks.size)

    def whole(self, context: int, hurried: bool) -> int:
        """Tokens of a chunk that neither a stop nor the prompt's end cuts short."""
        return int(self._nearest(context, hurried).size)

    def overhead(self, context: int, hurried: bool) -> float:
        """Tokens that take as long as the fixed time of a chunk."""
        chunks = self._nearest(context, hurried)
        return chunks.fixed / chunks.each if chunks.each else FIRST_OVERHEAD

    def fixed(self, context: int) -> float:
        """Seconds that an unhurried chunk takes however short it is; 0 if not known."""
        return self._nearest(context, hurried=False).fixed

    def read(self, context: int, hurried: bool, tokens: int, seconds: float) -> None:
        """A chunk of ``tokens``, padding included, was read in ``seconds``.

        What it adds to a step is measured by `stepped`.
        """
        self._between.append((context, hurried, tokens))
        if not hurried:
            self._learn(context, hurried, tokens, seconds)

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
            self._steps[depth].append(seconds)
            self._latest.append(seconds)
        elif len(between) == 1 and between[0][1] and self._steps[depth]:
            step = median(self._steps[depth])
            self._learn(*between[0], max(seconds - step, 0.0), step)

    def _learn(
        self, context: int, hurried: bool, tokens: int, seconds: float, step: float = 0.0
    ) -> None:
        """Take in what a chunk cost: ``seconds``, beside those of a step if it was hurried."""
        nearest, key = self._nearest(context, hurried), (hurried, _span(context))
        before = _Chunks(nearest.size, nearest.longest, nearest.fixed, nearest.each)
        chunks = self._chunks.setdefault(key, before)
        chunks.seen.append((tokens, seconds))
        lengths_differ = chunks.estimate_fixed()
        alike = [chunk for chunk in chunks.seen if chunk[0].bit_length() == tokens.bit_length()]
        fixed = min(chunks.fixed, median(seconds for _, seconds in alike))
        each = median(max(seconds - fixed, 0.0) / tokens for tokens, seconds in alike)
        chunks.each = each
        allowed = UNHURRIED_SECONDS
        if hurried:
            allowed = max((GAP - 1) * max(step, median(self._latest)), 3 / 2 * fixed)
        # The last chunk of a prompt is short and says little about longer ones.
        is_short = tokens < int(chunks.size) and seconds < allowed
        most = tokens * (MOST_GROWING if len(alike) >= FEWEST_ALIKE else 1)
        if is_short and most <= chunks.size:
            return
        fitting = (allowed - fixed) / each if each else most
        size = max(FEWEST_TOKENS, MOST_SHRINKING * tokens, min(fitting, most))
        # Too slow even at the fewest: a fixed time may be why, and one length cannot tell.
        if tokens == FEWEST_TOKENS and not lengths_differ:
            size = TELLING * tokens
        chunks.size = min(self._most, max(size, chunks.size if is_short else 0))
        more = (LAST_PIECE - 1) * (allowed + step) / each if each else size
        chunks.longest = chunks.size + min(more, chunks.size)

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
