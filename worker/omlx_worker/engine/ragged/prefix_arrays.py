"""What layers keep of a prompt, in two kinds of arrays.

Layers that keep the keys and values of every token have them in pages, and can be cut anywhere: a
piece is what they hold of a span. All other layers have states, which are valid at one position
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Self

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.models.ragged_model import Layers, RaggedModel

AT_ONCE = 64 << 20
"""Bytes that are copied before the device is waited for."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The shape and type of one kept array.

    Attributes:
        shape: of the array after one token.
        positions: kept of a sliding window, at most; 0 for a recurrent state; None if every
            position is kept.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    positions: int | None


@dataclass(frozen=True)
class LayerSpecs:
    """The specs of a model's arrays, a list for each layer."""

    layers: list[list[ArraySpec]]

    @classmethod
    def of(cls, model: RaggedModel) -> Self:
        layers = []
        for cache in model.new_caches(1, 1):  # never evaluated: only the shapes are wanted
            if isinstance(cache, AttentionCache):
                arrays = [array[:1, :, :1] for array in cache.pool.arrays]
                positions = cache.pool.ring or None
            else:
                arrays, positions = cache.states, 0
            layers.append([ArraySpec(array.shape, array.dtype, positions) for array in arrays])
        return cls(layers)

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values."""
        return sum(spec.dtype.size * prod(spec.shape) for spec in self.pieces)

    @property
    def pieces(self) -> list[ArraySpec]:
        return [spec for layer in self.layers for spec in layer if spec.positions is None]

    def layers_of(self, states: Sequence[mx.array]) -> Layers:
        """What each layer keeps besides pages, in array objects of its own."""
        rest = iter(states)
        return [
            [] if layer[0].positions is None else [copy(next(rest)) for _ in layer]
            for layer in self.layers
        ]


def copies(arrays: Iterable[mx.array]) -> list[mx.array]:
    """The same values in new array objects, which keep no much larger buffer alive.

    An array that fills its buffer, but for 16 KiB at most, shares it. All others are copied. Waits
    for the device after every `AT_ONCE` bytes. If nothing else holds the originals, this limits the
    memory that originals and copies take together.
    """
    copied: list[mx.array] = []
    started = 0
    for part in arrays:
        copied.append(mx.contiguous(part))
        started += part.nbytes
        if started > AT_ONCE:
            del part
            mx.eval(copied)
            started = 0
    mx.async_eval(copied)
    return copied


def size_of(arrays: Iterable[mx.array]) -> int:
    """Bytes of arrays."""
    total: int = sum(part.nbytes for part in arrays)
    return total
