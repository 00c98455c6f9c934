"""From the hidden states of a text to its vector, as the modules of sentence-transformers do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]


def normalize(x: mx.array) -> mx.array:
    """Vectors ``[N, D]`` of length 1."""
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@dataclass(frozen=True)
class Embedder:
    """Makes a vector of each text.

    Attributes:
        size: numbers of a vector.
        mean: whether the hidden states of all tokens are averaged; else the last one is taken.
        both_ways: whether every token sees those after it too, so that texts are read whole.
        layers: what is done with the pooled states, in order.
    """

    size: int
    mean: bool
    both_ways: bool
    layers: Sequence[Callable[[mx.array], mx.array]]

    def pool(self, hidden: mx.array, lengths: mx.array) -> mx.array:
        """The sum of a window's states, or its last one: ``[S, hidden]`` float32.

        Args:
            hidden: ``[S, W, hidden]``; NaN may be in padding.
            lengths: ``[S]`` int32, each row's tokens.
        """
        if not self.mean:
            last = mx.maximum(lengths - 1, 0)[:, None, None]
            return mx.take_along_axis(hidden, last, axis=1)[:, 0].astype(mx.float32)
        own = mx.arange(hidden.shape[1])[:, None] < lengths[:, None, None]
        return mx.where(own, hidden.astype(mx.float32), 0).sum(axis=1)

    def joined(self, before: mx.array | None, pooled: mx.array) -> mx.array:
        """What a text has pooled, from its earlier windows and the last one."""
        return before + pooled if self.mean and before is not None else pooled

    def vectors(self, pooled: mx.array, lengths: Sequence[int]) -> Floats:
        """The vectors ``[N, size]`` of texts from what they pooled. Waits for the device.

        Args:
            lengths: tokens of each text.
        """
        if self.mean:
            pooled = pooled / mx.array(list(lengths), mx.float32)[:, None]
        for layer in self.layers:
            pooled = layer(pooled)
        return np.array(pooled, np.float32)

    def shortened(self, vector: Floats, size: int) -> Floats:
        """The first numbers of a vector, of length 1 if whole ones are."""
        if size == self.size:
            return vector
        cut = vector[:size]
        return cut / max(float(np.linalg.norm(cut)), 1e-12) if normalize in self.layers else cut
