"""The interface between the ragged batch and a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.recurrent_cache import RecurrentCache
from omlx_worker.engine.kernels.window import Window
from omlx_worker.engine.models.embedder import Embedder

LayerCache = AttentionCache | RecurrentCache


class RaggedModel(Protocol):
    """Runs windows of many rows."""

    dtype: mx.Dtype
    vocabulary: int
    weight_bytes: int
    slow_parts: Sequence[str]
    """What runs without its fast form, in words."""

    @property
    def drafts(self) -> bool:
        """Whether something drafts for the model: its own head, or a draft model."""
        ...

    @property
    def advances(self) -> bool:
        """Whether a deeper draft is at the position after the one before it. Else all drafts of a
        step are at that of the first."""
        ...

    @property
    def embedder(self) -> Embedder | None:
        """Makes vectors of what is read; None of a model that generates."""
        ...

    @property
    def pads(self) -> bool:
        """Whether recurrent layers hold their states over padding on the right, in `prefill`."""
        ...

    def new_caches(self, slots: int, capacity: int) -> list[LayerCache]:
        """Caches of free slots with pages of their own, the head's after the backbone's."""
        ...

    def wrap(self, arrays: Sequence[Sequence[mx.array]]) -> list[LayerCache]:
        """Views around the layers' arrays, as a step receives them."""
        ...

    def forward(
        self, tokens: mx.array, caches: Sequence[LayerCache], window: Window, accepted: mx.array
    ) -> mx.array:
        """Run one window: ``[S, W]`` tokens to hidden states ``[S, W, hidden]``, as `logits` takes
        them.

        Args:
            accepted: ``[S]`` int32, drafts accepted of each row's last window; of no use to a
                window of prompts.
        """
        ...

    def prefill(self, tokens: mx.array, caches: Sequence[LayerCache], window: Window) -> mx.array:
        """Read a window of prompts into the caches; returns the same as `forward`.

        Args:
            tokens: ``[S, W + 1]``, the window and the token after each row's part of it.
        """
        ...

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array:
        """Run the head over a window.

        Args:
            tokens: ``[S, W + 1]``, the window's first token and the token after each position;
                or one draft deeper, ``[S, 1]``, the draft before.
            hidden: ``[S, W, hidden]`` of the positions, or the head's own output one deeper.

        Returns:
            ``[S, W, hidden]``, normed: what `draft_logits` scores for the token after each of
            the last ``W`` of ``tokens``.
        """
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Score hidden states: ``[..., hidden]`` to ``[..., vocabulary]``."""
        ...

    def draft_logits(self, hidden: mx.array) -> mx.array:
        """Score what `draft` returns, over the model's vocabulary."""
        ...
