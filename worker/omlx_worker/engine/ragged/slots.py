"""Slots: rows keep theirs from joining to leaving, unless the batch is resized or rearranged."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def pick(array: mx.array, slots: Sequence[int], size: int) -> mx.array:
    """These slots of an array, in this order, and empty ones after them, ``size`` in all."""
    picked = array[mx.array(list(slots), mx.int32)] if slots else array[:0]
    return mx.pad(picked, [(0, size - len(slots))] + [(0, 0)] * (array.ndim - 1))


def unmoved(moves: Sequence[int | None], size: int) -> bool:
    """Whether every row of ``size`` slots stays in its own."""
    return len(moves) == size and all(old in (None, slot) for slot, old in enumerate(moves))


def widened(array: mx.array, width: int) -> mx.array:
    """An array ``[S, W, ...]`` with at least ``width`` positions, zeros behind those it had."""
    extra = max(0, width - array.shape[1])
    return mx.pad(array, [(0, 0), (0, extra)] + [(0, 0)] * (array.ndim - 2)) if extra else array
