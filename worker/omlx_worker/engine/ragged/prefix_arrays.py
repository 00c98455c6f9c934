"""Takes arrays out of a prompt's caches, and fills caches with them again.

Layers that keep the keys and values of every token can be cut: their arrays are pieces, and
neighbouring pieces join. All other layers have states, which are valid at one position alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from omlx_worker.engine.ragged.prompt_cache import in_order, in_window, refill

AT_ONCE = 64 << 20
"""Bytes that are copied before the device is waited for."""


def pieces_of(caches: Sequence[Any]) -> list[mx.array]:
    """Keys and values, ``[1, H, T, D]``, of every layer that can be cut."""
    return [array for cache in caches if isinstance(cache, KVCache) for array in in_order(cache)]


def states_of(caches: Sequence[Any]) -> list[mx.array]:
    """The arrays of all other layers; those of a sliding window in the order of positions."""
    states: list[mx.array] = []
    for cache in caches:
        if isinstance(cache, RotatingKVCache):
            states += in_window(cache)
        elif not isinstance(cache, KVCache):
            states += cache.cache
    return states


@dataclass(frozen=True, slots=True)
class Form:
    """The shape and type of one kept array.

    Attributes:
        shape: of the array after one token.
        window: positions of a sliding window, at most; 0 for a recurrent state; None if every
            position is kept.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    window: int | None

    def fits(self, array: mx.array, start: int, end: int) -> bool:
        """Whether it can be what is kept of the positions from ``start`` to ``end``."""
        shape = list(self.shape)
        if self.window is None:
            shape[2] = end - start
        elif self.window:
            shape[2] = min(end, self.window)
        return list(array.shape) == shape and array.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of a model's pieces and states."""

    pieces: list[Form]
    states: list[Form]

    @classmethod
    def of(cls, caches: Sequence[Any]) -> Forms:
        """From caches that have read one token. Nothing is evaluated."""
        pieces = [Form(array.shape, array.dtype, None) for array in pieces_of(caches)]
        states = [
            Form(array.shape, array.dtype, getattr(cache, "max_size", 0))
            for cache in caches
            for array in states_of([cache])
        ]
        return cls(pieces, states)


def fill(
    caches: Sequence[Any],
    pieces: Sequence[Sequence[mx.array]],
    states: Sequence[mx.array],
    length: int,
) -> None:
    """Fill fresh caches as if they had read a prompt of ``length`` tokens.

    Args:
        pieces: one or more in a row; the last may be longer than needed.
        states: after these tokens.
    """
    columns = zip(*pieces, strict=True)
    # mlx-lm writes to a cache's arrays in place, so each cache gets objects of its own.
    copied = map(copy, states)
    for cache in caches:
        if isinstance(cache, KVCache):
            refill(cache, _joined(next(columns), length), _joined(next(columns), length), length)
        elif isinstance(cache, RotatingKVCache):
            refill(cache, next(copied), next(copied), length)
        else:
            cache.cache = [next(copied) for _ in cache.cache]


def fill_from_slot(
    caches: Sequence[Any], layers: Sequence[Sequence[mx.array]], length: int
) -> None:
    """Make fresh caches those of ``length`` tokens, from what ragged caches hold of a row.

    Args:
        layers: for each cache keys and values ``[1, H, L, D]``, each position at its index in a
            body or ring; or a recurrent layer's states.
    """
    for cache, arrays in zip(caches, layers, strict=True):
        if isinstance(cache, RotatingKVCache):
            latest = min(length, cache.max_size)
            first = (length - latest) % latest
            keys, values = (mx.roll(array[..., :latest, :], -first, 2) for array in arrays)
            refill(cache, keys, values, length)
        elif isinstance(cache, KVCache):
            keys, values = (array[..., :length, :] for array in arrays)
            refill(cache, keys, values, length)
        else:
            cache.cache = list(arrays)


def _joined(pieces: Sequence[mx.array], length: int) -> mx.array:
    """The first ``length`` positions, and the room that mlx-lm leaves for more."""
    *whole, last = pieces
    heads, dims = last.shape[1], last.shape[3]
    last = last[..., : length - sum(piece.shape[2] for piece in whole), :]
    room = KVCache.step - length % KVCache.step
    return mx.concatenate([*whole, last, mx.zeros((1, heads, room, dims), last.dtype)], axis=2)


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
