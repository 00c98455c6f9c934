"""The arrays of a ragged batch: every layer's cache and the state, with a slot for each row.

Everything here but `Buffers.keep` needs the pipeline drained: MLX updates a buffer in place only
while nothing in flight holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import AttentionCache, Move, moves_of
from omlx_worker.engine.caches.layout import Group, Layout, slots_of, unmoved
from omlx_worker.engine.caches.recurrent_cache import widened
from omlx_worker.engine.kernels.window import TAIL, Spans
from omlx_worker.engine.models.ragged_model import LayerCache, RaggedModel
from omlx_worker.engine.ragged.lookups import LONGEST, PIECE
from omlx_worker.engine.ragged.step import Arrays, State

_PER_ROW = ("pending", "cursors", "body_lengths", "accepted", "drafted", "source")
_CUT = ("drafts", "weights", "history")
"""Arrays whose second axis differs between batches."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One row's arrays outside any batch: as prefill left them, or as they were at suspension.

    Attributes:
        layers: the row's part of every layer's cache, ``[1, ...]``: keys and values of its
            whole history, or a recurrent layer's arrays; empty for an empty history.
        state: the row's part of the state, ``[1, ...]``.
    """

    layers: Arrays
    state: State

    @property
    def arrays(self) -> list[mx.array]:
        return [array for part in self.layers for array in part] + list(self.state.values())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class Buffers:
    """The arrays on the device.

    Attributes:
        caches: one a layer, the head's after the backbone's; none while the batch is empty.
        state: see `omlx_worker.engine.ragged.step`.
        layout: the groups of its slots.
    """

    def __init__(self, model: RaggedModel, *, looks_up: bool = False) -> None:
        self.caches: list[LayerCache] = []
        self.state: State = {}
        self.layout: Layout = ()
        self._model = model
        self._looks_up = looks_up

    @property
    def arrays(self) -> Arrays:
        return [cache.arrays for cache in self.caches]

    @property
    def written(self) -> Arrays:
        """What a step rewrites of every layer."""
        return [cache.written for cache in self.caches]

    def advance(self, written: Arrays) -> None:
        """Take what a step wrote."""
        for cache, part in zip(self.caches, written, strict=True):
            cache.advance(part)

    def settle(self) -> None:
        """Wait for the step in flight."""
        mx.eval(self.arrays, self.state)

    def clear(self) -> None:
        """Drop every array."""
        self.caches, self.state, self.layout = [], {}, ()

    def arrange(self, layout: Layout, moves: Sequence[int | None]) -> None:
        """Change to another layout.

        Args:
            moves: for each of its slots the slot whose row moves there, None for an empty one.
        """
        if not self.layout:
            self._make(layout[0])
            if len(layout) == 1:
                return
        stays = unmoved(moves, slots_of(self.layout))
        slots = mx.array([slot or 0 for slot in moves], mx.int32)
        for cache in self.caches:
            if isinstance(cache, AttentionCache):
                cache.arrange(moves, layout)
            elif not stays:
                cache.arrange(slots)
            # One layer at a time, so that only one layer's old buffers are held beside the new.
            mx.eval(cache.arrays)
        if not stays:
            self.state = {name: array[slots] for name, array in self.state.items()}
            taken = mx.array([slot is not None for slot in moves])
            for name in ("cursors", "body_lengths"):
                self.state[name] = self.state[name] * taken
        if self._looks_up:
            length = history_length(layout)
            self.state["history"] = widened(self.state["history"], length)[:, :length]
        self.layout = layout
        self.settle()
        # Otherwise freed buffers of old shapes pile up in a worker that runs for days.
        mx.clear_cache()

    def _make(self, group: Group) -> None:
        self.layout = (group,)
        self.caches = self._model.new_caches(group.slots, group.capacity)
        self.state = {name: mx.zeros((group.slots,), mx.int32) for name in _PER_ROW}
        if self._looks_up:
            shape = (group.slots, history_length(self.layout))
            self.state["history"] = mx.zeros(shape, mx.int32)

    def keep(self, name: str, wanted: bool, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        """Hold an array over the vocabulary, ``[S, *shape, V]``, only while it is wanted."""
        if not wanted:
            self.state.pop(name, None)
        elif name not in self.state:
            full = (slots_of(self.layout), *shape, self._model.vocabulary)
            self.state[name] = mx.zeros(full, dtype)

    def write(self, slot: int, row: Snapshot) -> None:
        """Write a row to a free slot, with as many of its drafts as the state has room for.

        The caller settles the buffers.
        """
        state = self.state
        for cache, part in zip(self.caches, row.layers or [[]] * len(self.caches), strict=True):
            if part:
                cache.write(slot, part)
            else:
                cache.clear(slot)
        for name, value in row.state.items():
            if name in _CUT and name in state:
                width = min(value.shape[1], state[name].shape[1])
                state[name][slot, :width] = value[0, :width]
            elif name in state:
                state[name][slot] = value[0]
        room = state["drafts"].shape[1] if "drafts" in state else 0
        state["drafted"][slot] = mx.minimum(row.state["drafted"][0], room)

    def read(self, slot: int, body_length: int, useless: Sequence[str]) -> tuple[Snapshot, int]:
        """Copy a row out of its slot, its tail appended to its body.

        Args:
            useless: arrays of the state that the row does not need.

        Returns:
            The copy, and the row's cursor.
        """
        cursor: int = self.state["cursors"][slot].item()  # type: ignore[assignment]
        # A gather: a slice would hold the whole batch's array.
        row = mx.array([slot])
        layers = [
            cache.read(slot, body_length, cursor)
            if isinstance(cache, AttentionCache)
            else [array[row] for array in cache.arrays]
            for cache in self.caches
        ]
        state = {name: array[row] for name, array in self.state.items() if name not in useless}
        snapshot = Snapshot(layers, state | {"body_lengths": state["cursors"]})
        mx.eval(snapshot.arrays)
        return snapshot, cursor

    def beginning(self, slot: int, body_length: int, length: int) -> Arrays:
        """Copies of what the layers hold of a row's first ``length`` tokens.

        The last of them is the first of the window that was read last, where recurrent states are.
        """
        row = mx.array([slot])
        return [
            [array[:, :, :length] for array in cache.read(slot, body_length, length)]
            if isinstance(cache, AttentionCache)
            else [state[row] for state in cache.states]
            for cache in self.caches
        ]

    def vacate(self, slot: int) -> None:
        """Reset a slot without a row, so that steps do not write past its tail."""
        self.state["cursors"][slot] = 0
        self.state["body_lengths"][slot] = 0

    def fold(self, tails: Sequence[tuple[int, int, int]]) -> None:
        """Move tails to their bodies and empty them.

        Args:
            tails: slots, body lengths and cursors.
        """
        moves: dict[tuple[Spans, int], list[Move]] = {}
        for cache in self.caches:
            if isinstance(cache, AttentionCache):
                shape = cache.spans, cache.ring
                if shape not in moves:
                    moves[shape] = moves_of(tails, *shape)
                cache.fold(moves[shape])
                # One layer at a time: what moves is held twice.
                mx.eval(cache.arrays)
        self.state["body_lengths"] = self.state["cursors"]


def history_length(layout: Layout) -> int:
    """Tokens of a history: of the longest body and a tail, in whole pieces, and `LONGEST`."""
    positions = max((group.capacity for group in layout), default=0) + TAIL
    return LONGEST + -(-positions // PIECE) * PIECE


def counts_of(tokens: Sequence[int], vocabulary: int) -> mx.array:
    """How often each token of the vocabulary occurs, ``[V]`` int32."""
    return mx.zeros((vocabulary,), mx.int32).at[mx.array(list(tokens), mx.int32)].add(1)
