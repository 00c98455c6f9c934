"""One row's arrays apart from any batch: as its prefill left it, or as it was suspended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from omlx_worker.engine.ragged.attention_cache import AttentionCache
from omlx_worker.engine.ragged.layer_cache import LayerCache
from omlx_worker.engine.ragged.recurrent_cache import RecurrentCache
from omlx_worker.engine.ragged.step import Arrays, State


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a slot must be filled with for a row to go on.

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


def take(
    caches: Sequence[LayerCache], state: State, slot: int, body_length: int, cursor: int
) -> Snapshot:
    """Copy a row out of its slot, the attention tail behind the body.

    Args:
        state: without the arrays that the row has no use for.
    """
    layers = [
        cache.read(slot, body_length, cursor)
        if isinstance(cache, AttentionCache)
        else [_row(array, slot) for array in cache.arrays]
        for cache in caches
    ]
    kept = {name: _row(array, slot) for name, array in state.items()}
    kept["body_lengths"] = kept["cursors"]
    return Snapshot(layers, kept)


def lay(snapshot: Snapshot, caches: Sequence[LayerCache], state: State, slot: int) -> None:
    """Write a row into a slot that is free. Drafts are kept as far as the state has room."""
    for cache, part in zip(caches, snapshot.layers or [[]] * len(caches), strict=True):
        if part:
            cache.write(slot, part)
        elif isinstance(cache, RecurrentCache):
            cache.clear(slot)
    for name, value in snapshot.state.items():
        if name in ("drafts", "weights") and name in state:
            depth = min(value.shape[1], state[name].shape[1])
            state[name][slot, :depth] = value[0, :depth]
        elif name in state:
            state[name][slot] = value[0]
    room = state["drafts"].shape[1] if "drafts" in state else 0
    state["drafted"][slot] = mx.minimum(snapshot.state["drafted"][0], room)


def _row(array: mx.array, slot: int) -> mx.array:
    # A gather, since a slice would hold on to the whole batch's array.
    return mx.take(array, mx.array([slot]), axis=0)
