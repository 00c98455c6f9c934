"""What a window of prompts costs: ``a + b n`` seconds for n tokens.

``a`` is what a window costs however few tokens it holds: the host's work, the launches, and reading
the weights. Both are fitted to what windows took, in each range of contexts by itself, because
attention makes ``b`` grow with the context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

REMEMBERED = 32
"""Windows that are remembered in each range of contexts. What is forgotten is tried again."""

SIMILAR = 4
"""Of them, those of about one size that count: attention slows them as the context grows."""

SHORTEST_SECONDS = 1e-9

Window = tuple[float, int]
"""The seconds and tokens of a window."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A window of n tokens takes ``fixed + n * each`` seconds.

    Attributes:
        fewest, most: half of the smallest window that was timed, and twice the largest. The line
            says nothing of windows beyond.
        guessed: windows of one size were timed, which does not tell the two parts apart.
    """

    fixed: float
    each: float
    fewest: float
    most: float
    guessed: bool = False

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
        # Until the next window: a scheduler asks for each row and step.
        self._costs: dict[int, Cost | None] = {}
        self._fitted: dict[int, Cost] = {}

    def add(self, context: int, tokens: int, seconds: float) -> None:
        """A window of ``tokens``, padding included, behind ``context`` took ``seconds``."""
        self._costs.clear()
        windows = self._windows.setdefault(_span(context), deque(maxlen=REMEMBERED))
        windows.append((max(seconds, SHORTEST_SECONDS), tokens))

    def at(self, context: int) -> Cost | None:
        """The cost of windows behind ``context`` tokens; None before any was timed.

        A range of contexts in which nothing was timed has the cost of the nearest shorter one.
        """
        last = _span(context)
        if last not in self._costs:
            cost = None
            for span in sorted(self._windows):
                if span <= last:
                    cost = _cost(_fastest(self._windows[span]), self._fitted.get(span, cost))
                    if not cost.guessed:
                        self._fitted[span] = cost
            self._costs[last] = cost
        return self._costs[last]


def _fastest(windows: Iterable[Window]) -> list[Window]:
    """The fastest of the last windows of each size: the others did something besides.

    Sizes of as many bits count as one.
    """
    sizes: dict[int, deque[Window]] = {}
    for window in windows:
        sizes.setdefault(window[1].bit_length(), deque(maxlen=SIMILAR)).append(window)
    return [min(similar) for similar in sizes.values()]


def _cost(points: Sequence[Window], before: Cost | None) -> Cost:
    """The cost in a range of contexts.

    Args:
        points: the seconds and tokens of windows of different sizes. Of one size, half is taken to
            be fixed, so that the next window has another size, or what is fixed in ``before``.
        before: the cost that was fitted there last, or in the nearest range of shorter contexts.
    """
    sizes = [tokens for _, tokens in points]
    guessed = len(points) == 1 and (before is None or before.guessed)
    if len(points) > 1:
        fixed, each = _line(points)
    else:
        [(seconds, tokens)] = points
        fixed = min(before.fixed, seconds) if before else seconds / 2
        each = (seconds - fixed) / tokens
    return Cost(fixed, each, min(sizes) / 2, 2 * max(sizes), guessed)


def _line(points: Sequence[Window]) -> tuple[float, float]:
    """The line with the least squares of relative errors, neither part negative."""
    # With x = 1 / seconds and y = tokens / seconds, fixed * x + each * y is 1 for every point.
    xs = [1 / seconds for seconds, _ in points]
    ys = [tokens / seconds for seconds, tokens in points]
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
