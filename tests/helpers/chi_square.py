"""Pearson's chi-square, with the bound that a true law exceeds once in a thousand times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

Outcome = TypeVar("Outcome")


def disagreement(counts: Mapping[Outcome, int], law: Mapping[Outcome, float]) -> float:
    """The chi-square statistic of counted outcomes over its bound at p = 0.001.

    Above 1 the counts do not follow the law. Outcomes that are expected fewer than five times
    are pooled. An outcome that the law rules out makes it infinite.
    """
    total = sum(counts.values())
    if any(law.get(outcome, 0.0) <= 0 for outcome in counts):
        return math.inf
    cells: list[tuple[float, float]] = []
    pooled = [0.0, 0.0]
    for outcome, p in law.items():
        observed, expected = float(counts.get(outcome, 0)), total * p
        if expected >= 5:
            cells.append((observed, expected))
        else:
            pooled[0] += observed
            pooled[1] += expected
    if pooled[1] >= 5:
        cells.append((pooled[0], pooled[1]))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    freedom = len(cells) - 1
    # The Wilson-Hilferty approximation of the upper quantile; 3.09 is the normal's at 0.001.
    spread = 2 / (9 * freedom)
    return statistic / (freedom * (1 - spread + 3.09 * math.sqrt(spread)) ** 3)
