"""Token sequences and vocabularies. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_BLOCK = 256  # tokens compared at once

_SAME = 0.99
"""Share of two vocabularies that must have the same ids. Families grow by a few tokens, and
converters add some."""


def same_ids(one: Mapping[str, int], other: Mapping[str, int]) -> int:
    """How many tokens two vocabularies have in common by the same ids."""
    return sum(other.get(token) == index for token, index in one.items())


def same_vocabulary(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether tokens of one model mean the same to another."""
    return same_ids(one, other) >= _SAME * max(len(one), len(other))


def in_common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many tokens, or characters, two sequences have in common from their start."""
    limit = min(len(one), len(other))
    for start in range(0, limit, _BLOCK):
        end = min(start + _BLOCK, limit)
        if one[start:end] != other[start:end]:
            return next(at for at in range(start, end) if one[at] != other[at])
    return limit
