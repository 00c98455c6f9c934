"""Token sequences. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 256  # tokens compared at once


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from their start."""
    limit = min(len(one), len(other))
    for start in range(0, limit, _BLOCK):
        end = min(start + _BLOCK, limit)
        if one[start:end] != other[start:end]:
            return next(place for place in range(start, end) if one[place] != other[place])
    return limit
