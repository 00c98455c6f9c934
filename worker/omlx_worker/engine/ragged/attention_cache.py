"""The per-row attention cache of a ragged batch: bodies and a tail.

Rows have slots and are left-aligned: the token at position ``p`` of a row's history is at index
``p`` of its slot, whatever its neighbours do. A cache object is a thin view around the arrays of
one layer. The step makes one from its arguments and returns the arrays it wrote; between steps the
batch uses one to write, fold or rearrange slots.

Why body and tail: MLX updates a buffer in place only while nothing in flight holds it, so with one
step dispatched ahead a single buffer would be copied whole every step. Bodies are read-only while
decoding; a step rewrites only the tail, ``TAIL`` positions long.

Why several bodies: neighbouring slots share one, and a body has one capacity; see
`omlx_worker.engine.ragged.layout`. The tail is one array over all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from omlx_worker.engine.ragged.layout import Layout, capacity_for, unmoved

TAIL = 256
"""Positions of the tail; a fold moves them to the body before it can overflow."""

Spans = tuple[tuple[int, int], ...]
"""Slots and capacity of each body, in the order of the slots."""


@dataclass(frozen=True)
class Window:
    """Where the tokens of one step go; shared by all attention layers of the step.

    Attributes:
        cursors: ``[S]`` int32, filled positions of each row's cache, which is the position of
            the window's first token.
        spans: of the layers' bodies; ``S_g`` and ``C_g`` below are those of one body.
        index: ``[S, 1, W, 1]``, tail positions of the window's keys and values.
        body_masks: for each body ``[S_g, 1, 1, C_g]`` bool, positions that hold history.
        tail_mask: ``[S, 1, W, TAIL]`` bool, tail positions that each query may see.
    """

    cursors: mx.array
    spans: Spans
    index: mx.array
    body_masks: tuple[mx.array, ...]
    tail_mask: mx.array

    @classmethod
    def at(cls, cursors: mx.array, body_lengths: mx.array, width: int, spans: Spans) -> Self:
        """The window of ``width`` tokens per row that starts at each row's cursor."""
        offsets = (cursors - body_lengths)[:, None] + mx.arange(width)
        return cls(
            cursors=cursors,
            spans=spans,
            index=offsets[:, None, :, None],
            body_masks=tuple(
                (mx.arange(capacity) < lengths[:, None])[:, None, None, :]
                for (_, capacity), lengths in zip(spans, _apart(body_lengths, spans), strict=True)
            ),
            tail_mask=mx.arange(TAIL) <= offsets[:, None, :, None],
        )


class AttentionCache:
    """Keys and values of one attention layer.

    Attributes:
        tail_keys, tail_values: ``[S, H, TAIL, D]``.
        bodies: keys and values of neighbouring slots, ``[S_g, H, C_g, D]`` each.
    """

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self.tail_keys, self.tail_values, *bodies = arrays
        self.bodies = list(zip(bodies[::2], bodies[1::2], strict=True))

    @classmethod
    def empty(cls, slots: int, heads: int, capacity: int, dim: int, dtype: mx.Dtype) -> Self:
        lengths = (TAIL, TAIL, capacity, capacity)
        return cls([mx.zeros((slots, heads, length, dim), dtype) for length in lengths])

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.tails, *(array for body in self.bodies for array in body)]

    @property
    def tails(self) -> list[mx.array]:
        return [self.tail_keys, self.tail_values]

    @property
    def written(self) -> list[mx.array]:
        """What a step rewrites: the tails alone."""
        return self.tails

    def advance(self, written: Sequence[mx.array]) -> None:
        """Take the tails that a step wrote."""
        self.tail_keys, self.tail_values = written

    @property
    def spans(self) -> Spans:
        return tuple((keys.shape[0], keys.shape[2]) for keys, _ in self.bodies)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, window: Window, scale: float
    ) -> mx.array:
        """Write the window's keys and values to the tail, then attend to body and tail.

        Args:
            queries: ``[S, Hq, W, D]``, rotated; ``Hq`` is a multiple of the key heads.
            keys: ``[S, H, W, D]``, rotated.
            values: ``[S, H, W, Dv]``.

        Returns:
            ``[S, Hq, W, Dv]``: one softmax over body and tail; the two weighted sums added.
        """
        slots, query_heads, width, dim = queries.shape
        heads = keys.shape[1]
        group = query_heads // heads
        self.tail_keys = mx.put_along_axis(self.tail_keys, window.index, keys, axis=2)
        self.tail_values = mx.put_along_axis(self.tail_values, window.index, values, axis=2)

        # Query heads that share a key head become rows of one product: [S, H, G * W, D].
        grouped = (queries * scale).reshape(slots, heads, group * width, dim)
        tail_mask = mx.tile(window.tail_mask, (1, 1, group, 1))
        shared = (grouped, self.tail_keys, self.tail_values, tail_mask)
        parts = zip(*(_apart(array, window.spans) for array in shared), strict=True)
        mixed = [
            _mixed(query, body, body_mask, *tail)
            for body, body_mask, (query, *tail) in zip(
                self.bodies, window.body_masks, parts, strict=True
            )
        ]
        whole = mixed[0] if len(mixed) == 1 else mx.concatenate(mixed)
        return whole.reshape(slots, query_heads, width, -1)

    def write(self, slot: int, prompt: Sequence[mx.array]) -> None:
        """Write a prefilled prompt, keys and values ``[1, H, L, D]``, to a slot's body."""
        body, row = self._place(slot)
        for array, part in zip(body, prompt, strict=True):
            # An index instead of the slice would copy the part once more.
            array[row : row + 1, :, : part.shape[2]] = part

    def read(self, slot: int, body_length: int, cursor: int) -> list[mx.array]:
        """Copy a slot's history, body and tail, in the form that `write` takes.

        Padded to a body's capacity, so that snapshots come in few sizes.
        """
        body, row = self._place(slot)
        end, extra = cursor - body_length, capacity_for(cursor) - cursor
        histories = []
        for array, tail in zip(body, self.tails, strict=True):
            whole = [array[row : row + 1, :, :body_length], tail[slot : slot + 1, :, :end]]
            room = mx.zeros((1, array.shape[1], extra, array.shape[3]), array.dtype)
            histories.append(mx.concatenate([*whole, room], axis=2))
        return histories

    def fold(self, slot: int, body_length: int, cursor: int) -> None:
        """Move a slot's tail, positions ``body_length`` to ``cursor``, to its body."""
        body, row = self._place(slot)
        for array, tail in zip(body, self.tails, strict=True):
            history = tail[slot : slot + 1, :, : cursor - body_length]
            array[row : row + 1, :, body_length:cursor] = history

    def arrange(self, moves: Sequence[int | None], layout: Layout) -> None:
        """Change to another layout.

        Args:
            moves: for each of its slots the slot whose row moves there, None for an empty one.
        """
        bodies = []
        start = 0
        for group in layout:
            inside = moves[start : start + group.slots]
            bodies.append(self._kept(inside, group.capacity) or self._built(inside, group.capacity))
            start += group.slots
        if not unmoved(moves, self.tail_keys.shape[0]):
            slots = mx.array([slot or 0 for slot in moves], mx.int32)
            self.tail_keys, self.tail_values = (tail[slots] for tail in self.tails)
        self.bodies = bodies

    def _kept(self, moves: Sequence[int | None], capacity: int) -> tuple[mx.array, mx.array] | None:
        """The body that already consists of exactly these slots, if there is one."""
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
                body, place = self._place(old)
                for array, was in zip((keys, values), body, strict=True):
                    length = min(capacity, was.shape[2])
                    array[row : row + 1, :, :length] = was[place : place + 1, :, :length]
        return keys, values

    def _place(self, slot: int) -> tuple[tuple[mx.array, mx.array], int]:
        """The body of a slot, and the slot's index in it."""
        for body, (slots, _) in zip(self.bodies, self.spans, strict=True):
            if slot < slots:
                return body, slot
            slot -= slots
        raise IndexError(slot)


def spans_of(caches: Sequence[object]) -> Spans:
    """The spans, which all attention layers share; empty without such a layer."""
    return next((cache.spans for cache in caches if isinstance(cache, AttentionCache)), ())


def _apart(array: mx.array, spans: Spans) -> list[mx.array]:
    """Split an array over all slots into one array a body."""
    if len(spans) == 1:
        return [array]
    ends, end = [], 0
    for slots, _ in spans[:-1]:
        end += slots
        ends.append(end)
    return list(mx.split(array, ends)) if spans else []


def _mixed(
    queries: mx.array,
    body: tuple[mx.array, mx.array],
    body_mask: mx.array,
    tail_keys: mx.array,
    tail_values: mx.array,
    tail_mask: mx.array,
) -> mx.array:
    """Attention of ``[S_g, H, G * W, D]`` queries to one body and its slots' tails."""
    body_keys, body_values = body
    on_body = queries @ body_keys.swapaxes(-1, -2)
    on_tail = queries @ tail_keys.swapaxes(-1, -2)
    floor = mx.finfo(on_body.dtype).min
    scores = mx.concatenate(
        [mx.where(body_mask, on_body, floor), mx.where(tail_mask, on_tail, floor)], axis=-1
    )
    weights = mx.softmax(scores, axis=-1, precise=True)
    capacity = body_keys.shape[2]
    return weights[..., :capacity] @ body_values + weights[..., capacity:] @ tail_values
