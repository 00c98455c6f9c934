"""The per-row cache of a recurrent layer: its state, and the inputs that may yet be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from omlx_worker.engine.caches.layout import Seat, Tail, unmoved


class RecurrentCache:
    """A recurrent layer whose commits are deferred, so that rejecting a draft costs nothing.

    The states are those after the first token of the last window, which is always committed. The
    window's other tokens are drafts, judged later: the cache keeps their inputs, and the next step
    first replays those of the accepted ones.

    Attributes:
        states: ``[S, ...]`` each. Of a gated delta net: the convolution's last inputs
            ``[S, kernel - 1, channels]`` and the state ``[S, H, Dv, Dk]``.
        kept: inputs ``[S, W, ...]`` of the whole window, padded at the end; empty if neither the
            window had drafts nor the next one has. Of a gated delta net: conv inputs
            ``[S, W, channels or more]``, keys ``[S, W, Hk, Dk]``, values ``[S, W, H, Dv]``, decay
            (float32) and beta ``[S, W, H]``.
    """

    paged, page_bytes = False, 0
    unwritten: Sequence[mx.array] = ()
    """See `AttentionCache`."""

    def __init__(self, arrays: Sequence[mx.array], states: int = 2) -> None:
        self.states, self.kept = list(arrays[:states]), list(arrays[states:])

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.states, *self.kept]

    @property
    def written(self) -> list[mx.array]:
        """What a step rewrites: everything."""
        return self.arrays

    def update(self, written: Sequence[mx.array]) -> None:
        """Take the arrays that a step wrote."""
        count = len(self.states)
        self.states, self.kept = list(written[:count]), list(written[count:])

    def write(self, seat: Seat, row: Sequence[mx.array]) -> None:
        """Write one row's arrays, ``[1, ...]`` each, to a slot.

        Args:
            row: the states after a prompt; for a row that has decoded, also the kept inputs of
                its last window. If that window and the batch's differ in width, the narrower is
                padded. Nothing for an empty row.
        """
        slot, kept = seat.slot, row[len(self.states) :]
        for index, state in enumerate(self.states):
            state[slot] = row[index][0] if row else 0
        if not kept:
            return
        slots, width = self.states[0].shape[0], kept[0].shape[1]
        self.kept = [
            widened(array, width)
            for array in self.kept or [mx.zeros((slots, *a.shape[1:]), a.dtype) for a in kept]
        ]
        for array, part in zip(self.kept, kept, strict=True):
            array[slot, :width] = part[0]

    def held(self, seat: Seat, length: int) -> list[mx.array]:  # noqa: ARG002
        """The states ``[1, ...]`` of a row, which no draft is to be replayed into."""
        return [state[seat.slot : seat.slot + 1] for state in self.states]

    def copy(self, slot: int) -> list[mx.array]:
        """Copy a row in the form that `write` takes."""
        # A gather: a slice would hold the whole batch's array.
        return [array[mx.array([slot])] for array in self.arrays]

    def of_prompts(self, rows: Sequence[Sequence[mx.array]], capacity: int) -> Self:  # noqa: ARG002
        """The cache of a window of prompts.

        Args:
            rows: the states of each row, ``[1, ...]`` each; nothing for an empty row.
        """
        stacks = [
            [row[n] if row else mx.zeros((1, *state.shape[1:]), state.dtype) for row in rows]
            for n, state in enumerate(self.states)
        ]
        states = [mx.concatenate(stack) if len(stack) > 1 else stack[0] for stack in stacks]
        return type(self)(states, len(states))

    def fit(self, width: int, widest: int) -> None:
        """Pad kept inputs to ``width``; if already wider, to ``widest``."""
        kept = self.kept[0].shape[1] if self.kept else 1
        if kept == width == 1:
            # Its only position is committed already.
            self.kept = []
        self.kept = [widened(array, widest if kept > width else width) for array in self.kept]

    def fold(self, tails: Sequence[Tail]) -> None:
        """There are no tails."""

    def move(self, slots: Sequence[int | None], capacity: int) -> None:  # noqa: ARG002
        """Change slots; see `AttentionCache.move`."""
        if not unmoved(slots, self.states[0].shape[0]):
            index = mx.array([slot or 0 for slot in slots], mx.int32)
            self.update([array[index] for array in self.arrays])

    def take_pool(self, other: Any) -> None:
        """There are no pages."""

    def copy_pages(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """There are no pages."""

    def resize(self, places: Sequence[int], size: int) -> None:
        """There are no pages."""


def widened(array: mx.array, width: int) -> mx.array:
    """An array ``[S, W, ...]`` padded with zeros to at least ``width`` positions."""
    extra = max(0, width - array.shape[1])
    return mx.pad(array, [(0, 0), (0, extra)] + [(0, 0)] * (array.ndim - 2)) if extra else array
