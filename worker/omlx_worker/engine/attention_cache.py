"""The per-row attention cache of a ragged batch: a body and a tail.

Rows live in slots and are left-aligned: the token at position ``p`` of a row's history lies at
index ``p`` of its slot, whatever its neighbours do. A cache object is a thin view around the
arrays of one layer: the step makes it from the arrays that came in and hands its ``arrays``
out again; between steps the batch makes it to write, fold, grow or pick slots.

Why an attention cache has two parts: MLX updates a buffer in place only when nothing in flight
holds it, so with one step dispatched ahead a single buffer would be copied whole every step.
The body is read-only while decoding, and only the tail, ``TAIL`` positions long, is rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from omlx_worker.engine.slots import pick

TAIL = 256
"""Positions of the tail; a fold moves them to the body once it may overflow."""

MIN_CAPACITY = 256
"""Positions of the smallest body; bodies grow by doubling, so that shapes repeat."""


def capacity_for(positions: int) -> int:
    """The smallest body capacity that holds ``positions``."""
    capacity = MIN_CAPACITY
    while capacity < positions:
        capacity *= 2
    return capacity


@dataclass(frozen=True)
class Window:
    """Where the tokens of one step go, shared by all attention layers of the step.

    Attributes:
        cursors: ``[S]`` int32, positions of each row's cache that are filled, which is the
            position of the window's first token.
        index: ``[S, 1, W, 1]``, where in the tail the window's keys and values are written.
        body_mask: ``[S, 1, 1, C]`` bool, positions of the body that hold history.
        tail_mask: ``[S, 1, W, TAIL]`` bool, positions of the tail each query may see.
    """

    cursors: mx.array
    index: mx.array
    body_mask: mx.array
    tail_mask: mx.array

    @classmethod
    def at(cls, cursors: mx.array, body_lengths: mx.array, width: int, capacity: int) -> Self:
        """The window of ``width`` tokens per row that starts at each row's cursor."""
        offsets = (cursors - body_lengths)[:, None] + mx.arange(width)
        return cls(
            cursors=cursors,
            index=offsets[:, None, :, None],
            body_mask=(mx.arange(capacity) < body_lengths[:, None])[:, None, None, :],
            tail_mask=mx.arange(TAIL) <= offsets[:, None, :, None],
        )


class AttentionCache:
    """Keys and values of one attention layer: bodies ``[S, H, C, D]``, tails of ``TAIL``."""

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self.body_keys, self.body_values, self.tail_keys, self.tail_values = arrays

    @classmethod
    def empty(
        cls, slots: int, heads: int, capacity: int, key_dim: int, value_dim: int, dtype: mx.Dtype
    ) -> Self:
        def zeros(length: int, dim: int) -> mx.array:
            return mx.zeros((slots, heads, length, dim), dtype)

        return cls(
            [
                zeros(capacity, key_dim),
                zeros(capacity, value_dim),
                zeros(TAIL, key_dim),
                zeros(TAIL, value_dim),
            ]
        )

    @property
    def arrays(self) -> list[mx.array]:
        return [self.body_keys, self.body_values, self.tail_keys, self.tail_values]

    @property
    def written(self) -> list[mx.array]:
        """What a step rewrites: the tails alone."""
        return [self.tail_keys, self.tail_values]

    def advance(self, written: Sequence[mx.array]) -> None:
        """Take over what a step wrote."""
        self.tail_keys, self.tail_values = written

    @property
    def capacity(self) -> int:
        return self.body_keys.shape[2]

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, window: Window, scale: float
    ) -> mx.array:
        """Write the window's keys and values to the tail and attend to the history and it.

        Args:
            queries: ``[S, Hq, W, D]``, rotated; ``Hq`` is a multiple of the key heads.
            keys: ``[S, H, W, D]``, rotated.
            values: ``[S, H, W, Dv]``.

        Returns:
            ``[S, Hq, W, Dv]``: one softmax over body and tail, the two weighted sums added.
        """
        slots, query_heads, width, dim = queries.shape
        heads = keys.shape[1]
        group = query_heads // heads
        self.tail_keys = mx.put_along_axis(self.tail_keys, window.index, keys, axis=2)
        self.tail_values = mx.put_along_axis(self.tail_values, window.index, values, axis=2)

        # Query heads that share a key head become rows of one product: [S, H, G * W, D].
        grouped = (queries * scale).reshape(slots, heads, group * width, dim)
        tail_mask = mx.tile(window.tail_mask, (1, 1, group, 1))
        body = grouped @ self.body_keys.swapaxes(-1, -2)
        tail = grouped @ self.tail_keys.swapaxes(-1, -2)
        floor = mx.finfo(body.dtype).min
        scores = mx.concatenate(
            [mx.where(window.body_mask, body, floor), mx.where(tail_mask, tail, floor)], axis=-1
        )
        weights = mx.softmax(scores, axis=-1, precise=True)
        capacity = self.capacity
        mixed = weights[..., :capacity] @ self.body_values
        mixed = mixed + weights[..., capacity:] @ self.tail_values
        return mixed.reshape(slots, query_heads, width, -1)

    def write(self, slot: int, prompt: Sequence[mx.array]) -> None:
        """Lay a prefilled prompt, keys and values ``[1, H, L, D]``, into a slot's body."""
        keys, values = prompt
        length = keys.shape[2]
        self.body_keys[slot, :, :length] = keys[0]
        self.body_values[slot, :, :length] = values[0]

    def fold(self, slot: int, body_length: int, cursor: int) -> None:
        """Move a slot's tail, the positions from its body length to its cursor, to its body."""
        length = cursor - body_length
        self.body_keys[slot, :, body_length:cursor] = self.tail_keys[slot, :, :length]
        self.body_values[slot, :, body_length:cursor] = self.tail_values[slot, :, :length]

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` positions in the bodies."""
        extra = [(0, 0), (0, 0), (0, capacity - self.capacity), (0, 0)]
        self.body_keys = mx.pad(self.body_keys, extra)
        self.body_values = mx.pad(self.body_values, extra)

    def pick(self, slots: Sequence[int], size: int) -> None:
        """Keep these slots, in this order, as the first of ``size`` slots."""
        self.body_keys, self.body_values, self.tail_keys, self.tail_values = (
            pick(array, slots, size) for array in self.arrays
        )
