"""What a window of prompts costs: ``a + b n`` seconds for n tokens.

``a`` is what a window costs however few tokens it holds: the host's work, the launches, reading the
weights, and the rest of the step in flight. Both are fitted to what windows took, in each range of
contexts by itself, because attention makes ``b`` grow with the context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

REMEMBERED = 32
"""Windows that are remembered in each range of contexts. What is forgotten is tried again."""

SHORTEST_SECONDS = 1e-9

Window = tuple[float, int]
"""The seconds and tokens of a window."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A window of n tokens takes ``fixed + n * each`` seconds.

    Attributes:
        fewest, most: half of the smallest window that was timed, and twice the largest. The line
            says nothing of windows beyond.
    """

    fixed: float
    each: float
    fewest: float
    most: float

    def tokens(self, seconds: float) -> float:
        """How many tokens take ``seconds``, from ``fewest`` to ``most``."""
        left = seconds - self.fixed
        if left <= self.each * self.fewest:
            return self.fewest
        return self.most if left >= self.each * self.most else left / self.each


class WindowCost:
    """Learns the cost of windows from their times."""

    def __init__(self) -> None:
        self._windows: dict[int, deque[Window]] = {}
        self._costs: dict[int, Cost] = {}

    def add(self, context: int, tokens: int, seconds: float) -> None:
        """A window of ``tokens``, padding included, behind ``context`` took ``seconds``."""
        span = _span(context)
        windows = self._windows.setdefault(span, deque(maxlen=REMEMBERED))
        windows.append((max(seconds, SHORTEST_SECONDS), tokens))
        self._costs[span] = _fitted(windows, self.at(context))

    def at(self, context: int) -> Cost | None:
        """The cost of windows behind ``context`` tokens; None before any was timed.

        A range of contexts in which nothing was timed has the cost of the nearest shorter one.
        """
        spans = (span for span in self._costs if span <= _span(context))
        return self._costs.get(max(spans, default=-1))


def _fitted(windows: Collection[Window], before: Cost | None) -> Cost:
    """The cost in a range of contexts.

    Args:
        windows: that were timed there. If all have about one size, what is fixed in ``before`` is
            fixed, or half without it, so that the next window has another size.
        before: the cost there until now, or in the nearest range of shorter contexts.
    """
    sizes = [tokens for _, tokens in windows]
    fewest, most = min(sizes), max(sizes)
    if most > 1.5 * fewest:
        fixed, each = _line(windows)
    else:
        seconds, tokens = min(windows)
        fixed = min(before.fixed, seconds) if before else seconds / 2
        each = (seconds - fixed) / tokens
    return Cost(fixed, each, fewest / 2, 2 * most)


def _line(windows: Collection[Window]) -> tuple[float, float]:
    """The line with the least squares of relative errors, neither part negative."""
    # With x = 1 / seconds and y = tokens / seconds, fixed * x + each * y is 1 for every window.
    xs = [1 / seconds for seconds, _ in windows]
    ys = [tokens / seconds for seconds, tokens in windows]
    x, y = sum(xs), sum(ys)
    xx, yy = sum(v * v for v in xs), sum(v * v for v in ys)
    xy = sum(one * other for one, other in zip(xs, ys, strict=True))
    fixed, each = x * yy - y * xy, y * xx - x * xy
    if fixed <= 0:
        return 0.0, y / yy
    if each <= 0:
        return x / xx, 0.0
    determinant = xx * yy - xy * xy
    return fixed / determinant, each / determinant


def _span(context: int) -> int:
    """Number of a range of contexts: ranges double in length, and the first holds 511 tokens."""
    return max(0, context.bit_length() - 9)
