"""What a decode step costs on four kinds of machine, in seconds; drafts made are included.

A table is a function of the batch's slots, the draft depth, which a step both verifies and makes
anew, and the tokens in the cache of the longest row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

CostTable = Callable[[int, int, int], float]

APPLE_PRODUCT = ((1, 0.129), (4, 0.165), (8, 0.323), (10, 0.51), (32, 0.51))
"""Tokens, and milliseconds of a 4-bit 5120 -> 17408 product over them on an M3 Max, published;
beyond 32 tokens every 32 more, begun or full, cost half a millisecond."""

H200_DEPTHS = (0, 1, 3)
H200_STEP = {
    1: (4.54, 7.17, 8.98),
    4: (8.30, 8.29, 9.20),
    8: (7.31, 7.84, 9.43),
    16: (7.43, 8.05, 10.03),
    32: (10.10, 9.87, 11.95),
}
"""Slots, and milliseconds at each of those depths: the compiled step of a 4B-shaped Qwen3.5 in
bfloat16 on an H200, measured. Other sizes and depth 2 lie between, depth 4 beyond."""


def apple(slots: int, depth: int, context: int) -> float:
    """A staircase: a dense 27B in 4 bits, 40 ms a token alone, of which its products take 30."""
    verify = _apple_product(slots * (1 + depth)) / APPLE_PRODUCT[0][1] * 30e-3
    # A head is one layer of many and the output matrix once more.
    draft = _apple_product(slots) / APPLE_PRODUCT[0][1] * 2e-3
    return 10e-3 + verify + depth * draft + slots * context * 2e-8


def h200(slots: int, depth: int, context: int) -> float:
    """Measured: depth costs little from 4 rows on, and much alone."""
    at = [
        _line([(size, steps[place]) for size, steps in H200_STEP.items()], slots)
        for place in range(len(H200_DEPTHS))
    ]
    milliseconds = _line(list(zip(H200_DEPTHS, at, strict=True)), depth)
    return milliseconds * 1e-3 + slots * context * 1e-9


def cpu(slots: int, depth: int, context: int) -> float:
    """A line: every token in the window costs nearly what one costs alone."""
    return 4e-3 + 6e-3 * slots * (1 + depth) + 1e-3 * depth + slots * context * 2e-8


def long_context(slots: int, depth: int, context: int) -> float:
    """Reading the cache is what costs, whatever the depth: drafts are nearly free."""
    return 8e-3 + 2.5e-6 * slots * context + 0.1e-3 * slots * (1 + depth) + 0.5e-3 * depth


TABLES: dict[str, CostTable] = {
    "apple": apple,
    "h200": h200,
    "cpu": cpu,
    "long": long_context,
}


def _apple_product(tokens: int) -> float:
    if tokens <= 32:
        return _line(APPLE_PRODUCT, tokens)
    return 0.5 * -(-tokens // 32)


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Straight between known points, and on beyond the last ones."""
    place = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
