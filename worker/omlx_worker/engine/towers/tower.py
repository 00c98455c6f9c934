"""What the engine needs of a model's vision tower: vectors of pictures, and a forward with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from PIL.Image import Image

from omlx_worker.engine.rows.picture import Sight


class Seen(NamedTuple):
    """The vectors of pictures within a window.

    Attributes:
        where: ``[S, W]`` bool, the tokens in whose place they are.
        vectors: ``[S, W, width]``, see `Tower`; zeros elsewhere.
    """

    where: mx.array
    vectors: mx.array


class Tower(Sight, Protocol):
    """A model's vision tower.

    Attributes:
        width: numbers of a vector: the hidden size, once for the embeddings and once for each layer
            that takes features of its own.
        weight_bytes: of its weights.
        sections: pairs of rotated numbers by time, height and width, where pictures are `spatial`.
    """

    width: int
    weight_bytes: int
    sections: Sequence[int]

    def see(self, picture: Image) -> mx.array:
        """The vectors ``[N, width]`` of a picture, in the model's type, row by row.

        Args:
            picture: as `omlx_worker.engine.rows.picture_file.pixels_of` returns it.
        """
        ...

    def room(self, vectors: int) -> int:
        """About how many bytes `see` takes in passing for a picture with this many vectors."""
        ...

    def run(self, text: Any, tokens: mx.array, seen: Seen, views: Sequence[Any]) -> mx.array:
        """The forward of a window with pictures, ``[S, W, hidden]``.

        Args:
            text: mlx-lm's model of the text, from embeddings to the last norm.
            tokens: ``[S, W]``.
            views: its layers' caches.
        """
        ...
