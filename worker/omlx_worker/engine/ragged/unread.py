"""What an MTP head has yet to read of one row's body: its prompt, and tails folded since.

A prompt that is read for rows that decode without drafts would be read by the head for nothing.
So its hidden states are kept instead, as those of folded tails are, until somebody drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.attention_cache import AttentionCache

MOST_UNREAD = 1024
"""Positions of a row for whose hidden states there is room; beyond that the head reads them, drafts
or not, and longer prompts at once."""


class Unread:
    """Neighbouring positions, the last of which is the last of the body.

    Attributes:
        begin: the first of them; the head has read what is before it.
    """

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self._hidden: list[mx.array] = []
        self._following: list[mx.array] = []

    def __len__(self) -> int:
        return sum(part.shape[1] for part in self._following)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self._hidden, *self._following]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def add(self, hidden: mx.array, following: mx.array) -> None:
        """Append positions.

        Args:
            hidden: ``[1, T, hidden]``, the backbone's output there.
            following: ``[1, T]`` int32, the token after each.
        """
        self._hidden.append(hidden)
        self._following.append(following)

    def read(self, model: RaggedModel, layers: Sequence[AttentionCache], slot: int) -> None:
        """Let the head read all this into its layers' bodies, which nothing in flight may hold."""
        caches = [KVCache() for _ in layers]
        if self.begin:
            for cache, layer in zip(caches, layers, strict=True):
                cache.state = (*layer.body(slot, self.begin), self.begin)
        hidden, following = (mx.concatenate(part, 1) for part in (self._hidden, self._following))
        model.read_by_head(following, hidden, caches)
        for cache, layer in zip(caches, layers, strict=True):
            layer.write(slot, cache.keys_and_values())
        mx.eval([layer.arrays for layer in layers])
