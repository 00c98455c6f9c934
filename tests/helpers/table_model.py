"""A model without layers, whose next token depends on the last one alone, by a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

VOCABULARY = 6


class TableModel:
    """A `RaggedModel`: hidden states are tokens, and scores are rows of a table.

    Attributes:
        target: ``[V, V]``, the backbone's scores of what follows each token.
        head: likewise the head's; the closer to the target's, the more drafts are accepted.
    """

    vocabulary = VOCABULARY
    dtype = mx.float32
    weight_bytes = 0
    pads = True
    embedder = None
    layers: Sequence[Any] = ()
    slow_parts: Sequence[str] = ()

    def __init__(self, closeness: float) -> None:
        noise = mx.random.normal((2, VOCABULARY, VOCABULARY), key=mx.random.key(7))
        self.target = 1.5 * noise[0]
        self.head = closeness * self.target + (1 - closeness) * 1.5 * noise[1]
        self.drafter: Any = _TableHead(self)

    def new_prompt_cache(self) -> list[Any]:
        return []

    def new_caches(self, *_: Any) -> list[Any]:
        return []

    def forward(self, tokens: mx.array, *_: Any) -> mx.array:
        return tokens[..., None]

    def logits(self, hidden: mx.array) -> mx.array:
        return self.target[hidden[..., 0]]


class _TableHead:
    """A `Drafter` by the table of a model's head."""

    advances = True

    def __init__(self, model: TableModel) -> None:
        self._model = model

    def draft(self, tokens: mx.array, hidden: mx.array, *_: Any) -> mx.array:
        return tokens[:, -hidden.shape[1] :, None]

    def logits(self, hidden: mx.array) -> mx.array:
        return self._model.head[hidden[..., 0]]
