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

from omlx_worker.engine.caches.layout import Seat, Tail, pages_for, unmoved
from omlx_worker.engine.kernels.attention import Attention, Heads
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.pool import Pair, Pool
from omlx_worker.engine.kernels.window import PAGE, TAIL, Window


class AttentionCache:
    """Keys and values of one attention layer.

    Args:
        arrays: the tails', then the pool's.
        ring: see `Pool`.
        attention: the device's implementation; None for the plain one.

    Attributes:
        tails: ``[S, H, TAIL, D]`` each.
        pool: the bodies.
    """

    def __init__(
        self,
        arrays: Sequence[mx.array],
        ring: int = 0,
        attention: Attention | None = None,
    ) -> None:
        tail_keys, tail_values, *bodies = arrays
        self.tails: Pair = tail_keys, tail_values
        self.pool = Pool(bodies, ring)
        self._attention = attention or PlainAttention()

    @property
    def paged(self) -> bool:
        """Whether bodies are pages."""
        return not self.pool.ring

    @property
    def page_bytes(self) -> int:
        """Of a page; 0 without pages."""
        return self.pool.position_bytes * PAGE if self.paged else 0

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.tails, *self.pool.arrays]

    @property
    def written(self) -> list[mx.array]:
        """What a step rewrites: the tails alone."""
        return list(self.tails)

    @property
    def unwritten(self) -> Sequence[mx.array]:
        """The others, which are the last of its arrays."""
        return self.pool.arrays

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
            queries, keys, values = heads.split(projected, window)
            self.put(keys, values, window)
        else:
            queries, self.tails = self._attention.prepare(projected, heads, self.tails, window)
        return queries

    def attend(self, queries: mx.array, window: Window, scale: float, **options: Any) -> mx.array:
        """Attend to body and tail; see `omlx_worker.engine.kernels.attention.Attention`."""
        attention = self._attention if window.lengths is None else PlainAttention()
        return attention.attend(queries, self.pool, self.tails, window, scale, **options)

    def write(self, seat: Seat, arrays: Sequence[mx.array]) -> None:
        """Write one row to its body.

        Args:
            arrays: keys and values ``[1, H, L, D]``, each position at its index in the body. What
                the body has no room for is padding. Nothing for an empty row.
        """
        if not arrays:
            return
        length = arrays[0].shape[2]
        if self.pool.ring:
            length = min(self.pool.length, length)
            self.pool.write(_ring_of(seat, length), [part[:, :, :length] for part in arrays])
        elif count := min(len(seat.pages), pages_for(length)):
            self.pool.write(
                mx.array(seat.pages[:count]), [_in_pages(part, count) for part in arrays]
            )

    def held(self, seat: Seat, length: int) -> list[mx.array]:
        """Keys and values ``[1, H, L, D]`` of a row's first ``length`` positions.

        They are copies unless there is a ring, whose last positions they are.
        """
        if self.pool.ring:
            return list(self.pool.gather(_ring_of(seat, length)))
        pages = mx.array([seat.pages[: pages_for(length)]], mx.int32)
        return [body[:, :, :length] for body in self.pool.bodies(pages)]

    def copy(self, slot: int) -> list[mx.array]:
        """Copy what a row has besides pages, in the form that `write` takes."""
        # A gather: a slice would hold the whole batch's array.
        return list(self.pool.gather(mx.array([slot]))) if self.pool.ring else []

    def of_prompts(self, rows: Sequence[Sequence[mx.array]], capacity: int) -> Self:
        """The cache of a window of prompts, which has the same pages.

        Args:
            rows: what each row has besides pages, ``[1, H, L, D]`` each; nothing for an empty row.
            capacity: positions of each row.
        """
        bodies, ring = self.pool
        if ring:
            length = min(pages_for(capacity) * PAGE, ring)
            bodies = [
                _stacked([row[n] if row else _empty(array) for row in rows], length)
                for n, array in enumerate(bodies)
            ]
        tails = [_empty(tail) for tail in self.tails]
        return type(self)([*tails, *bodies], ring, self._attention)

    def fold(self, tails: Sequence[Tail]) -> None:
        """Move these tails to the bodies."""
        rows, slots, sources, targets = _moves_of(tuple(tails), self.pool.ring)
        moved = [tail[slots, :, sources] for tail in self.tails]
        self.pool.write((rows, slice(None), targets), moved)

    def move(self, slots: Sequence[int | None], capacity: int) -> None:
        """Change slots.

        Args:
            slots: for each of the new ones that whose row moves there, None for an empty one.
            capacity: positions of a row.
        """
        ring = self.pool.ring
        moved = self.arrays if ring else self.written
        if not unmoved(slots, self.tails[0].shape[0]):
            index = mx.array([slot or 0 for slot in slots], mx.int32)
            moved = [array[index] for array in moved]
        self.update(moved[:2])
        if ring:
            self.pool = Pool([_padded(array, min(capacity, ring)) for array in moved[2:]], ring)

    def take_pool(self, other: Any) -> None:
        """Have the pool of another cache of this layer, which is not used any more."""
        if self.paged:
            self.pool = other.pool

    def copy_pages(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """Copy whole pages."""
        if self.paged:
            self.pool.copy(pages, to)

    def resize(self, places: Sequence[int], size: int) -> None:
        """Change the pool, which begins with what is at ``places``, to ``size`` pages."""
        if self.paged:
            self.pool = self.pool.resized(places, size)


def new_arrays(
    slots: int, capacity: int, heads: int, dims: tuple[int, int], ring: int, dtype: mx.Dtype
) -> list[mx.array]:
    """The arrays of free slots, with the pages of `own_pages`."""
    pages = pages_for(capacity)
    body = (slots, min(pages * PAGE, ring)) if ring else (slots * pages, PAGE)
    sizes = [(count, n, d) for count, n in ((slots, TAIL), body) for d in dims]
    return [mx.zeros((count, heads, n, d), dtype) for count, n, d in sizes]


def _empty(array: mx.array) -> mx.array:
    """``[1, H, 0, D]``."""
    return mx.zeros((1, array.shape[1], 0, array.shape[3]), array.dtype)


def _ring_of(seat: Seat, length: int) -> tuple[slice, ...]:
    """Where the first positions of a row's ring are. A number in place of the slice would copy."""
    return slice(seat.slot, seat.slot + 1), slice(None), slice(length)


def _in_pages(part: mx.array, count: int) -> mx.array:
    """``[1, H, L, D]`` as pages ``[count, H, PAGE, D]``."""
    whole = _padded(part, count * PAGE)
    return whole[0].reshape(whole.shape[1], count, PAGE, -1).swapaxes(0, 1)


def _stacked(rows: Sequence[mx.array], length: int) -> mx.array:
    padded = [_padded(row, length) for row in rows]
    return mx.concatenate(padded) if len(padded) > 1 else padded[0]


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
    """``[S, H, L, D]`` padded with zeros, or cut, to ``length`` positions."""
    array = array[:, :, :length]
    missing = length - array.shape[2]
    return mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else array
