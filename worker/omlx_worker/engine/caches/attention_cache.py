"""The per-row attention cache of a ragged batch: bodies and a tail.

Rows have slots and are left-aligned: the token at position ``p`` of a row's history is at index
``p`` of its slot, whatever its neighbours do. A cache object is a thin view around the arrays of
one layer. The step makes one from its arguments and returns the arrays it wrote; between steps the
batch uses one to write, fold or rearrange slots.

Why body and tail: MLX updates a buffer in place only while nothing in flight holds it, so with one
step dispatched ahead a single buffer would be copied whole every step. Bodies are read-only while
decoding; a step rewrites only the tail, ``TAIL`` positions long.

Why several bodies: neighbouring slots share one, and a body has one capacity; see
`omlx_worker.engine.caches.layout`. The tail is one array over all slots.

A layer with a sliding window keeps no more of a body than a ring of the window's size: position
``p`` is at index ``p`` modulo the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

import mlx.core as mx

from omlx_worker.engine.caches.layout import Layout, capacity_for, unmoved
from omlx_worker.engine.kernels.attention import Attention, Heads, Pair
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.window import TAIL, Spans, Window

Tail = tuple[int, int, int]
"""The slot of a row, its body length and its cursor: what is between them is in the tail."""


class AttentionCache:
    """Keys and values of one attention layer.

    Args:
        attention: the device's implementation; None for the plain one.

    Attributes:
        tails: ``[S, H, TAIL, D]`` each.
        bodies: of neighbouring slots, ``[S_g, H, C_g, D]`` each.
        ring: positions of a body, at most; 0 for a layer without a sliding window.
    """

    def __init__(
        self,
        arrays: Sequence[mx.array],
        ring: int = 0,
        attention: Attention | None = None,
    ) -> None:
        tail_keys, tail_values, *bodies = arrays
        self.tails: Pair = tail_keys, tail_values
        self.bodies: list[Pair] = list(zip(bodies[::2], bodies[1::2], strict=True))
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
        """Caches of free slots.

        Args:
            dims: of a head's keys and of its values.
        """
        lengths = (TAIL, min(capacity, ring) if ring else capacity)
        arrays = [mx.zeros((slots, heads, n, d), dtype) for n in lengths for d in dims]
        return cls(arrays, ring, attention)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.tails, *(array for body in self.bodies for array in body)]

    @property
    def written(self) -> list[mx.array]:
        """What a step rewrites: the tails alone."""
        return list(self.tails)

    def update(self, written: Sequence[mx.array]) -> None:
        """Take the tails that a step wrote."""
        keys, values = written
        self.tails = keys, values

    @property
    def spans(self) -> Spans:
        return tuple((keys.shape[0], keys.shape[2]) for keys, _ in self.bodies)

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

    def write(self, slot: int, arrays: Sequence[mx.array]) -> None:
        """Write one row to the body of a slot.

        Args:
            arrays: keys and values ``[1, H, L, D]``, each position at its index in the body. What
                the body has no room for is padding. Nothing for an empty row.
        """
        self._clear(slot)
        body, row = self._body_of(slot)
        for array, part in zip(body, arrays, strict=False):
            length = min(array.shape[2], part.shape[2])
            # An index instead of the slice would copy the part once more.
            array[row : row + 1, :, :length] = part[:, :, :length]

    def held(self, slot: int, body_length: int, length: int) -> list[mx.array]:
        """Keys and values ``[1, H, L, D]`` of a row's first ``length`` positions."""
        if length > body_length:
            return [array[:, :, :length] for array in self.copy(slot, body_length, length)]
        body, row = self._body_of(slot)
        return [array[row : row + 1, :, :length] for array in body]

    def absorb(self, done: Sequence[int], ends: Sequence[int]) -> None:
        """Move a window of prompts, which is the tail, to the only body.

        Args:
            done: each row's tokens before the window.
            ends: likewise after it.
        """
        [body], (keys, values) = self.bodies, self.tails
        rows = [(slice(n, n + 1), *each) for n, each in enumerate(zip(done, ends, strict=True))]
        if len(set(done)) == 1:
            # At once, padding too.
            rows = [(slice(None), done[0], max(ends))]
        if max(ends) > body[0].shape[2]:  # a ring begins anew
            self.fold(list(zip(range(len(done)), done, ends, strict=True)))
        else:
            for array, tail in zip(body, self.tails, strict=True):
                for row, start, end in rows:
                    array[row, :, start:end] = tail[row, :, : end - start]
        self.tails = mx.zeros_like(keys[:, :, :0]), mx.zeros_like(values[:, :, :0])

    def _clear(self, slot: int) -> None:
        """Forget a slot's last row. What is masked may reach sums, and 0 * NaN is NaN."""
        body, row = self._body_of(slot)
        for array in body:
            array[row] = 0
        for tail in self.tails:
            tail[slot] = 0

    def copy(self, slot: int, body_length: int, cursor: int) -> list[mx.array]:
        """Copy a row, body and tail, in the form that `write` takes.

        Padded to a body's capacity, so that copies come in few sizes.
        """
        body, row = self._body_of(slot)
        capacity = self._limited(capacity_for(cursor))
        padded = [_padded(array[row : row + 1, :, :capacity], capacity) for array in body]
        tails = [tail[slot : slot + 1] for tail in self.tails]
        copied = AttentionCache([*tails, *padded], self.ring)
        copied.fold([(0, body_length, cursor)])
        return list(copied.bodies[0])

    def fold(self, tails: Sequence[Tail]) -> None:
        """Move these tails to the bodies."""
        moves = _moves_of(tuple(tails), self.spans, self.ring)
        for body, (rows, slots, sources, targets) in zip(self.bodies, moves, strict=True):
            for array, tail in zip(body, self.tails, strict=True):
                array[rows, :, targets] = tail[slots, :, sources]

    def _limited(self, capacity: int) -> int:
        return min(capacity, self.ring) if self.ring else capacity

    def arrange(self, moves: Sequence[int | None], layout: Layout) -> None:
        """Change to another layout.

        Args:
            moves: for each of its slots the slot whose row moves there, None for an empty one.
        """
        bodies = []
        start = 0
        for group in layout:
            inside = moves[start : start + group.slots]
            capacity = self._limited(group.capacity)
            bodies.append(self._kept(inside, capacity) or self._built(inside, capacity))
            start += group.slots
        keys, values = self.tails
        if not unmoved(moves, keys.shape[0]):
            slots = mx.array([slot or 0 for slot in moves], mx.int32)
            self.tails = keys[slots], values[slots]
        self.bodies = bodies

    def _kept(self, moves: Sequence[int | None], capacity: int) -> tuple[mx.array, mx.array] | None:
        """The body that already consists of exactly these slots, if there is one."""
        if not any(old is not None for old in moves):
            # Any body would do, and another group may have it: rings are alike in size.
            return None
        start = 0
        for body, (slots, size) in zip(self.bodies, self.spans, strict=True):
            inside = [None if old is None else old - start for old in moves]
            if capacity == size and unmoved(inside, slots):
                return body
            start += slots
        return None

    def _built(self, moves: Sequence[int | None], capacity: int) -> tuple[mx.array, mx.array]:
        keys, values = (
            mx.zeros((len(moves), array.shape[1], capacity, array.shape[3]), array.dtype)
            for array in self.bodies[0]
        )
        for row, old in enumerate(moves):
            if old is not None:
                body, index = self._body_of(old)
                for array, was in zip((keys, values), body, strict=True):
                    length = min(capacity, was.shape[2])
                    array[row : row + 1, :, :length] = was[index : index + 1, :, :length]
        return keys, values

    def _body_of(self, slot: int) -> tuple[Pair, int]:
        """The body of a slot, and the slot's index in it."""
        for body, (slots, _) in zip(self.bodies, self.spans, strict=True):
            if slot < slots:
                return body, slot
            slot -= slots
        raise IndexError(slot)


def spans_of(caches: Sequence[object]) -> Spans:
    """The spans of the layers, rings not considered; empty without attention layers."""
    spans = [cache.spans for cache in caches if isinstance(cache, AttentionCache)]
    return max(spans, default=())


@lru_cache(maxsize=4)
def _moves_of(tails: tuple[Tail, ...], spans: Spans, ring: int) -> list[list[mx.array]]:
    """Which positions of tails go to each body; kept for the other layers with such bodies.

    Returns:
        For each body ``[N]`` int32: its rows, the slots, the indices in the tail and in the body.
    """
    moves = []
    first = 0
    for slots, _ in spans:
        positions = [
            (slot - first, slot, position - length, position % ring if ring else position)
            for slot, length, cursor in tails
            if first <= slot < first + slots
            for position in range(max(length, cursor - ring) if ring else length, cursor)
        ]
        columns = zip(*positions, strict=True) if positions else [()] * 4
        moves.append([mx.array(column, mx.int32) for column in columns])
        first += slots
    return moves


def _padded(array: mx.array, length: int) -> mx.array:
    """``[1, H, L, D]`` padded with zeros to ``length`` positions."""
    return mx.pad(array, [(0, 0), (0, 0), (0, length - array.shape[2]), (0, 0)])
