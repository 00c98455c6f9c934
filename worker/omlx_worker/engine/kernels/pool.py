"""The bodies of one attention layer: keys and values that are read and written together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import mlx.core as mx

Pair = tuple[mx.array, mx.array]
"""Keys ``[S, H, L, D]`` and values ``[S, H, L, Dv]``."""


class Pool(NamedTuple):
    """Pages, which `Window.table` names; in a layer with a sliding window a ring for each slot.

    Attributes:
        arrays: keys and values, ``[P, H, PAGE, D]`` each; with a ring ``[S, H, C, D]``.
        ring: positions of a body, at most; 0 for pages.
    """

    arrays: Sequence[mx.array]
    ring: int = 0

    @property
    def length(self) -> int:
        """Positions of a page, or of the rings, which have no more than rows have needed."""
        length: int = self.arrays[0].shape[2]
        return length

    @property
    def position_bytes(self) -> int:
        """Of one position of a row."""
        nbytes = sum(array.nbytes for array in self.arrays)
        return nbytes // (self.arrays[0].shape[0] * self.length)

    def gather(self, index: Any = slice(None)) -> Pair:
        """Keys and values at an index of the arrays; all of them without one."""
        keys, values = (array[index] for array in self.arrays)
        return keys, values

    def bodies(self, table: mx.array) -> Pair:
        """The bodies ``[S, H, M * PAGE, D]`` that pages ``[S, M]`` make."""
        heads = self.arrays[0].shape[1]
        index = table[:, None] * heads + mx.arange(heads)[:, None]
        keys, values = (array.flatten(0, 1)[index].flatten(2, 3) for array in self.arrays)
        return keys, values

    def write(self, index: Any, parts: Sequence[mx.array]) -> None:
        """Write keys and values to an index of the arrays, in place."""
        for array, part in zip(self.arrays, parts, strict=True):
            array[index] = part

    def copy(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """Copy whole pages, in place."""
        for array in self.arrays:
            array[mx.array(list(to))] = array[mx.array(list(pages))]

    def resized(self, places: Sequence[int], size: int) -> Self:
        """A pool of ``size`` pages that begins with those at ``places``."""
        index, arrays = mx.array(list(places), mx.int32), self.arrays
        if index.size < arrays[0].shape[0]:
            arrays = [array[index] for array in arrays]
        extra = [(0, size - index.size)] + [(0, 0)] * 3
        return self._replace(arrays=[mx.pad(array, extra) for array in arrays])
