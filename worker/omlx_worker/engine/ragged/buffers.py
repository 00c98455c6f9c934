"""The arrays of a ragged batch: every layer's cache and the state, with a slot for each row.

Everything here but `Buffers.keep` and what is about the latest hidden states wants the pipeline
drained: MLX updates a buffer in place only while nothing in flight holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.attention_cache import TAIL, AttentionCache
from omlx_worker.engine.ragged.layer_cache import LayerCache
from omlx_worker.engine.ragged.layout import Layout, slots_of
from omlx_worker.engine.ragged.slots import pick, unmoved
from omlx_worker.engine.ragged.snapshot import Snapshot, lay, take
from omlx_worker.engine.ragged.step import Arrays, State

NOTED = 32
"""Positions of hidden states that are noted before they are written to their places."""

_MEMORY = ("hidden", "following")
_PER_ROW = ("pending", "cursors", "body_lengths", "accepted", "drafted")


class Buffers:
    """What the device holds of a batch.

    Args:
        remembers: whether hidden states are kept for a head that is left out at times.

    Attributes:
        caches: one a layer, the head's after the backbone's; none while the batch is empty.
        state: see `omlx_worker.engine.ragged.step`.
        layout: the groups that its slots come in.
    """

    def __init__(self, model: RaggedModel, *, remembers: bool) -> None:
        self.caches: list[LayerCache] = []
        self.state: State = {}
        self.layout: Layout = ()
        self._model = model
        self._remembers = remembers
        self._latest: list[tuple[mx.array, mx.array, mx.array]] = []

    @property
    def arrays(self) -> Arrays:
        return [cache.arrays for cache in self.caches]

    @property
    def slots(self) -> int:
        return slots_of(self.layout)

    @property
    def latest(self) -> list[mx.array]:
        """What was noted last."""
        return list(self._latest[-1]) if self._latest else []

    def set_memory_aside(self) -> State:
        """Take the hidden states and what follows them out of the state."""
        return {name: self.state.pop(name) for name in _MEMORY}

    def note_latest(self) -> None:
        """Keep what a step has left behind in the state, for `take_up_latest`."""
        place, hidden = self.state.pop("place"), self.state.pop("latest")
        self._latest.append((place, hidden, self.state["pending"]))
        if len(self._latest) == NOTED:
            self.take_up_latest()

    def take_up_latest(self) -> None:
        """Write what was noted to its place, while rows still are in the slots they were in.

        No row comes to the same place twice in these steps, each of which is one token.
        """
        if not self._latest:
            return
        latest, self._latest = self._latest, []
        place = mx.concatenate([place for place, _, _ in latest], axis=1)
        hidden = mx.concatenate([hidden for _, hidden, _ in latest], axis=1)
        following = mx.stack([token for _, _, token in latest], axis=1)
        state = self.state
        state["hidden"] = mx.put_along_axis(state["hidden"], place[..., None], hidden, axis=1)
        state["following"] = mx.put_along_axis(state["following"], place, following, axis=1)

    def settle(self) -> None:
        """Wait for whatever is under way."""
        self.take_up_latest()
        mx.eval(self.arrays, self.state)

    def clear(self) -> None:
        self.caches, self.state, self.layout = [], {}, ()
        self._latest = []

    def arrange(self, layout: Layout, moves: Sequence[int | None]) -> None:
        """Take up a layout.

        Args:
            moves: for each of its slots the slot whose row moves there, None for an empty one.
        """
        if not self.layout:
            self._make(layout)
            return
        stays = unmoved(moves, self.slots)
        slots = [slot or 0 for slot in moves]
        for cache in self.caches:
            if isinstance(cache, AttentionCache):
                cache.arrange(moves, layout)
            elif not stays:
                cache.pick(slots, len(slots))
            # Layer by layer, so that old and new buffers of only one are held at a time.
            mx.eval(cache.arrays)
        if not stays:
            self.state = {
                name: pick(array, slots, len(slots)) for name, array in self.state.items()
            }
            taken = mx.array([slot is not None for slot in moves])
            for name in ("cursors", "body_lengths"):
                self.state[name] = self.state[name] * taken
        self.layout = layout
        self.settle()
        # Buffers of shapes that are gone would pile up in a worker that runs for days.
        mx.clear_cache()

    def _make(self, layout: Layout) -> None:
        [group] = layout
        self.layout = layout
        self.caches = self._model.new_caches(group.slots, group.capacity)
        self.state = {name: mx.zeros((group.slots,), mx.int32) for name in _PER_ROW}
        if self._remembers:
            hidden = (group.slots, TAIL, self._model.hidden)
            self.state["hidden"] = mx.zeros(hidden, self._model.dtype)
            self.state["following"] = mx.zeros((group.slots, TAIL), mx.int32)

    def keep(self, name: str, wanted: bool, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        """Hold an array over the vocabulary only while it is wanted."""
        if not wanted:
            self.state.pop(name, None)
        elif name not in self.state:
            full = (self.slots, *shape, self._model.vocabulary)
            self.state[name] = mx.zeros(full, dtype)

    def write(self, slot: int, row: Snapshot) -> None:
        """Fill a free slot."""
        lay(row, self.caches, self.state, slot)
        self.settle()

    def read(self, slot: int, body_length: int, useless: Sequence[str]) -> tuple[Snapshot, int]:
        """Copy a row out of its slot; the arrays named are left out. Returns its cursor, too."""
        cursor: int = self.state["cursors"][slot].item()  # type: ignore[assignment]
        state = {name: array for name, array in self.state.items() if name not in useless}
        snapshot = take(self.caches, state, slot, body_length, cursor)
        mx.eval(snapshot.arrays)
        return snapshot, cursor

    def vacate(self, slot: int) -> None:
        """A slot without a row must not write past its tail."""
        self.state["cursors"][slot] = 0
        self.state["body_lengths"][slot] = 0

    def fold(self, tails: Sequence[tuple[int, int, int]]) -> None:
        """Move tails to their bodies and start them afresh: slots, body lengths and cursors."""
        for cache in self.caches:
            if isinstance(cache, AttentionCache):
                for slot, body_length, cursor in tails:
                    cache.fold(slot, body_length, cursor)
                mx.eval(cache.arrays)
        self.state["body_lengths"] = self.state["cursors"]
