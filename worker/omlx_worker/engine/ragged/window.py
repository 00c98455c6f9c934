"""The window of tokens that a step runs for each row: where they go, and what they may see."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Self

import mlx.core as mx

TAIL = 128
"""Positions of the tail; a fold moves them to the body before it can overflow.

Every step copies the tail, and every fold waits for the step in flight.
"""

Spans = tuple[tuple[int, int], ...]
"""Slots and capacity of each body, in the order of the slots."""


@dataclass(frozen=True)
class Window:
    """Where the tokens of one step go; shared by all attention layers of the step.

    Attributes:
        cursors: ``[S]`` int32, filled positions of each row's cache, which is the position of
            the window's first token.
        body_lengths: ``[S]`` int32, how many of them are in the bodies.
        spans: of the layers' bodies; ``S_g`` and ``C_g`` below are those of one body.
        index: ``[S, 1, W, 1]``, tail positions of the window's keys and values.
        places: ``[S, 3]`` int32, body lengths, cursors and the positions between, for kernels.
    """

    cursors: mx.array
    body_lengths: mx.array
    spans: Spans
    index: mx.array
    places: mx.array
    _masks: dict[tuple[int, int], tuple[list[mx.array], mx.array]] = field(default_factory=dict)

    @classmethod
    def at(cls, cursors: mx.array, body_lengths: mx.array, width: int, spans: Spans) -> Self:
        """The window of ``width`` tokens per row that starts at each row's cursor."""
        offsets = (cursors - body_lengths)[:, None] + mx.arange(width)
        # One array, so that a single slot's are more than MLX keeps in memory shared with the host.
        places = mx.stack([body_lengths, cursors, cursors - body_lengths], axis=1)
        return cls(cursors, body_lengths, spans, offsets[:, None, :, None], places)

    def masks(self, sliding: int = 0, ring: int = 0) -> tuple[list[mx.array], mx.array]:
        """What each query may see of the bodies and of the tail; made once for all layers.

        Args:
            sliding: how many of the latest positions, its own included; 0 for all.
            ring: positions of a layer's bodies, at most; 0 for all.

        Returns:
            For each body ``[S_g, 1, W or 1, C_g]`` bool, and ``[S, 1, W, TAIL]`` bool.
        """
        if (sliding, ring) not in self._masks:
            self._masks[sliding, ring] = self._masked(sliding, ring)
        return self._masks[sliding, ring]

    def _masked(self, sliding: int, ring: int) -> tuple[list[mx.array], mx.array]:
        tail = mx.arange(TAIL) <= self.index
        lengths = self.body_lengths[:, None, None, None]
        # The first tail index that each query sees; below 0 it sees some of the body too.
        first = self.index - (sliding - 1)
        if sliding:
            tail = tail & (mx.arange(TAIL) >= first)
        bodies = []
        for (_, size), length, start in zip(
            self.spans,
            apart(lengths, self.spans),
            apart(lengths + first, self.spans),
            strict=True,
        ):
            capacity = min(size, ring) if ring else size
            position = mx.arange(capacity)
            if ring:
                # The latest position of the history at each index; negative if there is none.
                position = length - 1 - (length - 1 - position) % ring
                mask = position >= 0
            else:
                mask = position < length
            bodies.append(mask & (position >= start) if sliding else mask)
        return bodies, tail


def apart(array: mx.array, spans: Spans) -> list[mx.array]:
    """Slice an array over all slots into one array a body.

    Not `mx.split`: where a split takes a fused comparison apart, `mx.compile` fails with an
    IndexError (MLX 0.32.4).
    """
    if len(spans) == 1:
        return [array]
    ends = list(accumulate(slots for slots, _ in spans))
    return [array[start:end] for start, end in pairwise([0, *ends])]
