"""The per-row attention cache of a ragged batch: bodies and a tail.

Rows have slots and are left-aligned: the token at position ``p`` of a row's history is at place
``p`` of its body, whatever its neighbours do. A cache object is a thin view around the arrays of
one layer. The step makes one from its arguments and returns the arrays it wrote; between steps the
batch uses one to write, fold or rearrange slots.

Why body and tail: MLX updates a buffer in place only while nothing in flight holds it, so with one
step dispatched ahead a single buffer would be copied whole every step. Bodies are read-only while
decoding; a step rewrites only the tail, ``TAIL`` positions long.

Bodies are pages of one pool; `Window.table` has the pages of each row, the same in all layers. A
layer with a sliding window keeps no more of a body than a ring of the window's size, without pages:
position ``p`` is at index ``p`` modulo the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

import mlx.core as mx

from omlx_worker.engine.caches.layout import Layout, Seat, Tail, pages_for, unmoved
from omlx_worker.engine.kernels.attention import Attention, Heads, Pair
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.window import PAGE, TAIL, Window


class AttentionCache:
    """Keys and values of one attention layer.

    Args:
        attention: the device's implementation; None for the plain one.

    Attributes:
        tails: ``[S, H, TAIL, D]`` each.
        bodies: the pool ``[P, H, PAGE, D]`` each; with a ring ``[S, H, C, D]``.
        ring: positions of a body, at most; 0 for a layer without a sliding window.
    """

    def __init__(
        self,
        arrays: Sequence[mx.array],
        ring: int = 0,
        attention: Attention | None = None,
    ) -> None:
        tail_keys, tail_values, body_keys, body_values = arrays
        self.tails: Pair = tail_keys, tail_values
        self.bodies: Pair = body_keys, body_values
        self.ring = ring
        self._attention = attention or PlainAttention()

    @classmethod
    def empty(
        cls,
        slots: int,
        heads: int,
        capacity: int,
        dims: tuple[int, int],
        dtype: mx.Dtype,
        ring: int = 0,
        attention: Attention | None = None,
    ) -> Self:
        """Caches of free slots, with the pages of `own_pages`.

        Args:
            dims: of a head's keys and of its values.
        """
        pages = pages_for(capacity)
        body = (slots, min(pages * PAGE, ring)) if ring else (slots * pages, PAGE)
        shapes = [(count, heads, n, d) for count, n in ((slots, TAIL), body) for d in dims]
        return cls([mx.zeros(shape, dtype) for shape in shapes], ring, attention)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.tails, *self.bodies]

    @property
    def written(self) -> list[mx.array]:
        """What a step rewrites: the tails alone."""
        return list(self.tails)

    def update(self, written: Sequence[mx.array]) -> None:
        """Take the tails that a step wrote."""
        keys, values = written
        self.tails = keys, values

    def put(self, keys: mx.array, values: mx.array, window: Window) -> None:
        """Write the window's keys ``[S, H, W, D]``, rotated, and values ``[S, H, W, Dv]``."""
        if window.lengths is not None:
            self.tails = mx.nan_to_num(keys), mx.nan_to_num(values)
        else:
            self.tails = self._attention.put(self.tails, keys, values, window)

    def prepare(self, projected: mx.array, heads: Heads, window: Window) -> mx.array:
        """Write the window's keys and values, and return its queries ``[S, Hq, W, D]``.

        Args:
            projected: see `omlx_worker.engine.kernels.attention.Heads`.
        """
        if window.lengths is not None:
            queries, keys, values = heads.split(projected, window.cursors)
            self.put(keys, values, window)
        else:
            queries, self.tails = self._attention.prepare(projected, heads, self.tails, window)
        return queries

    def attend(self, queries: mx.array, window: Window, scale: float, **options: Any) -> mx.array:
        """Attend to body and tail; see `omlx_worker.engine.kernels.attention.Attention`."""
        attention = self._attention if window.lengths is None else PlainAttention()
        return attention.attend(
            queries, self.bodies, self.tails, window, scale, ring=self.ring, **options
        )

    def write(self, seat: Seat, arrays: Sequence[mx.array]) -> None:
        """Write one row to its body.

        Args:
            arrays: keys and values ``[1, H, L, D]``, each position at its index in the body. What
                the body has no room for is padding. Nothing for an empty row.
        """
        for array, part in zip(self.bodies, arrays, strict=False):
            if self.ring:
                length = min(array.shape[2], part.shape[2])
                # An index instead of the slice would copy the part once more.
                array[seat.slot : seat.slot + 1, :, :length] = part[:, :, :length]
            elif count := min(len(seat.pages), pages_for(part.shape[2])):
                whole = _padded(part[:, :, : count * PAGE], count * PAGE)
                laid = whole[0].reshape(whole.shape[1], count, PAGE, -1).swapaxes(0, 1)
                array[mx.array(seat.pages[:count])] = laid

    def held(self, seat: Seat, body_length: int, length: int) -> list[mx.array]:
        """Keys and values ``[1, H, L, D]`` of a row's first ``length`` positions."""
        if self.ring and length <= body_length:
            return [array[seat.slot : seat.slot + 1, :, :length] for array in self.bodies]
        copied = self.copy(seat, body_length, max(length, body_length))
        return [array[:, :, :length] for array in copied]

    def copy(self, seat: Seat, body_length: int, cursor: int) -> list[mx.array]:
        """Copy a row, body and tail, in the form that `write` takes."""
        slot, pages = seat
        tails = [tail[slot : slot + 1] for tail in self.tails]
        if self.ring:
            length = min(max(cursor, self.bodies[0].shape[2]), self.ring)
            bodies = [_padded(array[slot : slot + 1], length) for array in self.bodies]
        else:
            missing = [(0, max(0, pages_for(cursor) - len(pages)))] + [(0, 0)] * 3
            index = mx.array(pages, mx.int32)
            bodies = [mx.pad(array[index], missing) for array in self.bodies]
        copied = AttentionCache([*tails, *bodies], self.ring)
        if cursor > body_length:
            copied.fold([(Seat(0, tuple(range(pages_for(cursor)))), body_length, cursor)])
        if self.ring:
            return list(copied.bodies)
        return [array.swapaxes(0, 1).flatten(1, 2)[None] for array in copied.bodies]

    def absorb(self, tails: Sequence[Tail]) -> None:
        """Move a window of prompts, which is the tail, to the bodies."""
        self.fold(tails)
        keys, values = self.tails
        self.tails = mx.zeros_like(keys[:, :, :0]), mx.zeros_like(values[:, :, :0])

    def fold(self, tails: Sequence[Tail]) -> None:
        """Move these tails to the bodies."""
        rows, slots, sources, targets = _moves_of(tuple(tails), self.ring)
        for array, tail in zip(self.bodies, self.tails, strict=True):
            array[rows, :, targets] = tail[slots, :, sources]

    def arrange(
        self, moves: Sequence[int | None], layout: Layout, kept: Sequence[int] | None = None
    ) -> None:
        """Change to another layout.

        Args:
            moves: for each of its slots the slot whose row moves there, None for an empty one.
            kept: the pages to begin with, from the first on; None for all, as they are.
        """
        parts = [self.tails, self.bodies] if self.ring else [self.tails]
        if not unmoved(moves, self.tails[0].shape[0]):
            slots = mx.array([slot or 0 for slot in moves], mx.int32)
            parts = [(keys[slots], values[slots]) for keys, values in parts]
        self.tails = parts[0]
        if self.ring:
            length = min(layout.capacity, self.ring)
            self.bodies = _both(_padded, parts[1], length)
            return
        if kept is not None:
            index = mx.array(list(kept), mx.int32)
            self.bodies = self.bodies[0][index], self.bodies[1][index]
        extra = layout.pages - self.bodies[0].shape[0]
        if extra > 0:
            self.bodies = _both(
                lambda array, n: mx.pad(array, [(0, n)] + [(0, 0)] * 3), self.bodies, extra
            )


def _both(function: Any, pair: Pair, *options: Any) -> Pair:
    return function(pair[0], *options), function(pair[1], *options)


@lru_cache(maxsize=4)
def _moves_of(tails: tuple[Tail, ...], ring: int) -> list[mx.array]:
    """Which positions of tails go where; kept for the other layers with such bodies.

    Returns:
        ``[N]`` int32 each: pages, or slots with a ring, the slots, the places in the tail and in
        the page or body.
    """
    places = [
        (seat, position, position - length)
        for seat, length, cursor in tails
        for position in range(max(length, cursor - ring) if ring else length, cursor)
    ]
    rows = [seat.slot if ring else seat.pages[at // PAGE] for seat, at, _ in places]
    targets = [at % (ring or PAGE) for _, at, _ in places]
    columns = rows, [seat.slot for seat, *_ in places], [source for *_, source in places], targets
    return [mx.array(column, mx.int32) for column in columns]


def _padded(array: mx.array, length: int) -> mx.array:
    """``[1, H, L, D]`` padded with zeros, or cut, to ``length`` positions."""
    array = array[:, :, :length]
    return mx.pad(array, [(0, 0), (0, 0), (0, length - array.shape[2]), (0, 0)])
