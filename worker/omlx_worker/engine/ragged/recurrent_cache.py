"""The per-row cache of a gated delta net: a state, and the inputs that may yet be replayed."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from omlx_worker.engine.ragged.slots import pick, widened


class RecurrentCache:
    """A gated delta net whose commits are deferred, so that rejecting a draft costs nothing.

    ``conv`` (``[S, kernel - 1, channels]``) and ``state`` (``[S, H, Dv, Dk]``) stand after the
    first token of the last window, which is always committed. The window's other tokens are
    drafts that were judged only later: its inputs are kept, and the next step first replays as
    many as were accepted.

    Attributes:
        kept: conv inputs ``[S, W, channels or more]``, keys ``[S, W, Hk, Dk]``, values
            ``[S, W, H, Dv]``, decay (float32) and beta ``[S, W, H]`` of the whole window, behind
            which there may be padding; empty after a window that no draft came of.
    """

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self.conv, self.state, *self.kept = arrays

    @property
    def arrays(self) -> list[mx.array]:
        return [self.conv, self.state, *self.kept]

    @property
    def written(self) -> list[mx.array]:
        """What a step rewrites: everything."""
        return self.arrays

    def advance(self, written: Sequence[mx.array]) -> None:
        """Take over what a step wrote."""
        self.conv, self.state, *self.kept = written

    def write(self, slot: int, row: Sequence[mx.array]) -> None:
        """Lay one row's arrays, ``[1, ...]`` each, into a slot.

        Args:
            row: a prefilled prompt's conv inputs and state; behind them what was kept of its
                last window, if it has decoded. That window and the batch's may differ in width;
                the narrower is padded.
        """
        conv, state, *kept = row
        self.conv[slot] = conv[0]
        self.state[slot] = state[0]
        if not kept:
            return
        slots, width = self.conv.shape[0], kept[0].shape[1]
        self.kept = [
            widened(array, width)
            for array in self.kept or [mx.zeros((slots, *a.shape[1:]), a.dtype) for a in kept]
        ]
        for array, part in zip(self.kept, kept, strict=True):
            array[slot, :width] = part[0]

    def fit(self, width: int, widest: int) -> None:
        """Pad what is kept to one width or, where it is more than that, to the other."""
        kept = self.kept[0].shape[1] if self.kept else 1
        if kept == width == 1:
            # Its only position is committed already.
            self.forget()
        self.kept = [widened(array, widest if kept > width else width) for array in self.kept]

    def forget(self) -> None:
        """No draft of the last window can be accepted any more."""
        self.kept = []

    def clear(self, slot: int) -> None:
        """Make a slot the empty history."""
        self.conv[slot] = 0
        self.state[slot] = 0

    def pick(self, slots: Sequence[int], size: int) -> None:
        """Keep these slots, in this order, as the first of ``size`` slots."""
        self.advance([pick(array, slots, size) for array in self.arrays])
