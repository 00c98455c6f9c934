"""The interface between the ragged batch and a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from omlx_worker.engine.ragged.attention_cache import AttentionCache
from omlx_worker.engine.ragged.recurrent_cache import RecurrentCache
from omlx_worker.engine.ragged.window import Window

LayerCache = AttentionCache | RecurrentCache


class RaggedModel(Protocol):
    """Prefills rows, decodes windows of many. `RaggedQwen35` documents the methods."""

    dtype: mx.Dtype
    vocabulary: int
    weight_bytes: int

    @property
    def drafts(self) -> bool:
        """Whether something drafts for the model: its own head, or a draft model."""
        ...

    @property
    def pads(self) -> bool:
        """Whether `prefill` may read rows of different lengths, padded on the right."""
        ...

    def new_prompt_cache(self) -> list[Any]: ...

    def prefill(self, tokens: mx.array, following: mx.array, caches: Sequence[Any]) -> None: ...

    def prompt_arrays(self, caches: Sequence[Any]) -> list[list[mx.array]]: ...

    def new_caches(self, slots: int, capacity: int) -> list[LayerCache]: ...

    def wrap(self, arrays: Sequence[Sequence[mx.array]]) -> list[LayerCache]: ...

    def forward(
        self, tokens: mx.array, caches: Sequence[LayerCache], window: Window, accepted: mx.array
    ) -> mx.array: ...

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array: ...

    def logits(self, hidden: mx.array) -> mx.array: ...

    def draft_logits(self, drafted: mx.array) -> mx.array:
        """Score what `draft` returns, over the model's vocabulary."""
        ...
