"""The arrays of a ragged batch: every layer's cache and the state, with a slot for each row.

Everything here but `Buffers.keep` needs the pipeline drained: MLX updates a buffer in place only
while nothing in flight holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.attention_cache import AttentionCache
from omlx_worker.engine.ragged.layer_cache import LayerCache
from omlx_worker.engine.ragged.layout import Layout, slots_of
from omlx_worker.engine.ragged.slots import pick, unmoved
from omlx_worker.engine.ragged.snapshot import Snapshot, lay, take
from omlx_worker.engine.ragged.step import Arrays, State

_PER_ROW = ("pending", "cursors", "body_lengths", "accepted", "drafted")


class Buffers:
    """What the device holds of a batch.

    Attributes:
        caches: one a layer, the head's after the backbone's; none while the batch is empty.
        state: see `omlx_worker.engine.ragged.step`.
        layout: the groups that its slots come in.
    """

    def __init__(self, model: RaggedModel) -> None:
        self.caches: list[LayerCache] = []
        self.state: State = {}
        self.layout: Layout = ()
        self._model = model

    @property
    def arrays(self) -> Arrays:
        return [cache.arrays for cache in self.caches]

    @property
    def slots(self) -> int:
        return slots_of(self.layout)

    def settle(self) -> None:
        """Wait for whatever is under way."""
        mx.eval(self.arrays, self.state)

    def clear(self) -> None:
        self.caches, self.state, self.layout = [], {}, ()

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
