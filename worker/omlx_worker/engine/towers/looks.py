"""The vectors of the pictures that a tower looked at last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import mlx.core as mx

from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.rows.picture_file import pixels_of
from omlx_worker.engine.towers.tower import Tower

MOST_KEPT = 64 << 20
"""Bytes of vectors that are kept for other questions about the same pictures."""

MOST_BYTES = 4
"""Of each number of a vector, at most."""


class Looks:
    """Looks at pictures one at a time, and at none again that it knows by its digest.

    It belongs to the decode thread. The least recently used vectors go.
    """

    def __init__(self, tower: Tower) -> None:
        self.tower = tower
        self._kept: OrderedDict[bytes, mx.array] = OrderedDict()

    def bytes_for(self, vectors: Sequence[int]) -> int:
        """The most bytes that vectors and the tower take, also those that rows have left here.

        Args:
            vectors: of each row, those that are still to be read.
        """
        tower = self.tower
        held = sum(vectors) * tower.width * MOST_BYTES
        return held + MOST_KEPT + tower.room(min(max(vectors, default=0), tower.most))

    @property
    def nbytes(self) -> int:
        """Of the vectors that are kept."""
        return sum(vectors.nbytes for vectors in self._kept.values())

    def vectors_of(self, picture: Picture) -> mx.array:
        """``[N, hidden]`` of a picture. Waits for the device, so it can be timed.

        Raises:
            BadPicture: if it cannot be decoded.
        """
        if (vectors := self._kept.get(picture.digest)) is not None:
            self._kept.move_to_end(picture.digest)
            return vectors
        vectors = self.tower.see(pixels_of(picture.data))
        if len(vectors) != picture.count:
            raise ValueError(f"{len(vectors)} vectors of a picture that has {picture.count}")
        mx.eval(vectors)
        self._kept[picture.digest] = vectors
        while self.nbytes > MOST_KEPT:
            self._kept.popitem(last=False)
        return vectors
