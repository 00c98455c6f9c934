"""What layers keep of a prompt, in two kinds of arrays.

Layers that keep the keys and values of every token can be cut: their arrays are pieces, and
neighbouring pieces join. All other layers have states, which are valid at one position alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.models.ragged_model import RaggedModel

AT_ONCE = 64 << 20
"""Bytes that are copied before the device is waited for."""

Layers = list[list[mx.array]]
"""What each layer keeps of a row: keys and values ``[1, H, L, D]``, each position at its index in a
body, or states ``[1, ...]``."""


@dataclass(frozen=True, slots=True)
class Form:
    """The shape and type of one kept array.

    Attributes:
        shape: of the array after one token.
        positions: kept of a sliding window, at most; 0 for a recurrent state; None if every
            position is kept.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    positions: int | None

    def fits(self, array: mx.array, start: int, end: int) -> bool:
        """Whether it can be what is kept of the positions from ``start`` to ``end``."""
        shape = list(self.shape)
        if self.positions is None:
            shape[2] = end - start
        elif self.positions:
            shape[2] = min(end, self.positions)
        return list(array.shape) == shape and array.dtype == self.dtype


@dataclass(frozen=True)
class Forms:
    """The forms of a model's arrays, a list for each layer."""

    layers: list[list[Form]]

    @classmethod
    def of(cls, model: RaggedModel) -> Self:
        layers = []
        for cache in model.new_caches(1, 1):  # never evaluated: only the shapes are wanted
            if isinstance(cache, AttentionCache):
                arrays, positions = [array[:1] for array in cache.bodies], cache.ring or None
            else:
                arrays, positions = cache.states, 0
            layers.append([Form(array.shape, array.dtype, positions) for array in arrays])
        return cls(layers)

    @property
    def pieces(self) -> list[Form]:
        return [form for layer in self.layers for form in layer if form.positions is None]

    @property
    def states(self) -> list[Form]:
        return [form for layer in self.layers for form in layer if form.positions is not None]

    def split(self, layers: Layers) -> tuple[list[mx.array], list[mx.array]]:
        """The pieces and the states of a row."""
        pieces: list[mx.array] = []
        states: list[mx.array] = []
        for forms, arrays in zip(self.layers, layers, strict=True):
            (pieces if forms[0].positions is None else states).extend(arrays)
        return pieces, states

    def join(
        self, pieces: Sequence[Sequence[mx.array]], states: Sequence[mx.array], length: int
    ) -> Layers:
        """What the layers keep of ``length`` tokens.

        Args:
            pieces: one or more in a row; the last may be longer than needed.
            states: after these tokens.
        """
        columns, rest = zip(*pieces, strict=True), iter(states)
        return [
            [
                _joined(next(columns), length) if f.positions is None else copy(next(rest))
                for f in layer
            ]
            for layer in self.layers
        ]


def _joined(pieces: Sequence[mx.array], length: int) -> mx.array:
    *whole, last = pieces
    last = last[..., : length - sum(piece.shape[2] for piece in whole), :]
    return mx.concatenate([*whole, last], axis=2) if whole else last


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


def halves(pieces: list[mx.array], at: int) -> tuple[list[mx.array], list[mx.array]]:
    """Copies of what is before a position and from it on; the list is emptied meanwhile."""

    def cut() -> Iterator[mx.array]:
        while pieces:
            piece = pieces.pop(0)
            yield piece[..., :at, :]
            yield piece[..., at:, :]

    copied = copies(cut())
    return copied[::2], copied[1::2]


def size_of(arrays: Iterable[mx.array]) -> int:
    """Bytes of arrays."""
    total: int = sum(part.nbytes for part in arrays)
    return total
