"""The interface between the ragged batch and a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.recurrent_cache import RecurrentCache
from omlx_worker.engine.kernels.window import Window

LayerCache = AttentionCache | RecurrentCache


class RaggedModel(Protocol):
    """Runs windows of many rows. `RaggedQwen35` documents the methods."""

    dtype: mx.Dtype
    vocabulary: int
    weight_bytes: int

    @property
    def drafts(self) -> bool:
        """Whether something drafts for the model: its own head, or a draft model."""
        ...

    @property
    def pads(self) -> bool:
        """Whether recurrent layers hold their states over padding on the right, in `prefill`."""
        ...

    def new_caches(self, slots: int, capacity: int) -> list[LayerCache]: ...

    def wrap(self, arrays: Sequence[Sequence[mx.array]]) -> list[LayerCache]: ...

    def forward(
        self, tokens: mx.array, caches: Sequence[LayerCache], window: Window, accepted: mx.array
    ) -> mx.array: ...

    def prefill(self, tokens: mx.array, caches: Sequence[LayerCache], window: Window) -> None: ...

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array: ...

    def logits(self, hidden: mx.array) -> mx.array: ...

    def draft_logits(self, drafted: mx.array) -> mx.array:
        """Score what `draft` returns, over the model's vocabulary."""
        ...
