"""A smaller model of the same vocabulary that drafts for a model.

Its caches are in step with the model's: place ``t`` holds the token at position ``t``. So every
step starts with the pending token, which the target has just read and the draft model may not have:
the row may have joined, or a fold may have dropped what it had read ahead of the cursor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.kernels.window import TAIL, Window
from omlx_worker.engine.models.any_family import Unsupported
from omlx_worker.engine.models.ragged_model import LayerCache, RaggedModel


class WithDraftModel:
    """A `RaggedModel` for which another one drafts.

    Its caches are the target's, then the draft model's.

    Raises:
        Unsupported: if the draft model has recurrent layers. Those would have to replay the tokens
            of the last window before every draft.
    """

    drafts = advances = True
    embedder = None

    def __init__(self, target: RaggedModel, draft: RaggedModel) -> None:
        if not all(isinstance(cache, AttentionCache) for cache in draft.new_caches(1, TAIL)):
            raise Unsupported("a draft model must keep keys and values alone")
        self._target = target
        self._draft = draft
        self._layers = len(target.new_caches(1, TAIL))
        self.dtype: mx.Dtype = target.dtype
        self.vocabulary: int = target.vocabulary
        self.weight_bytes: int = target.weight_bytes + draft.weight_bytes
        self.logits = target.logits
        self.pads = target.pads
        self.slow_parts: Sequence[str] = [
            *target.slow_parts,
            *(f"draft model: {part}" for part in draft.slow_parts),
        ]

    def new_caches(self, slots: int, capacity: int) -> list[LayerCache]:
        return [
            *self._target.new_caches(slots, capacity),
            *self._draft.new_caches(slots, capacity),
        ]

    def wrap(self, arrays: Sequence[Sequence[mx.array]]) -> list[LayerCache]:
        own, others = self._apart(arrays)
        return [*self._target.wrap(own), *self._draft.wrap(others)]

    def forward(
        self, tokens: mx.array, caches: Sequence[LayerCache], window: Window, accepted: mx.array
    ) -> mx.array:
        return self._target.forward(tokens, self._apart(caches)[0], window, accepted)

    def prefill(self, tokens: mx.array, caches: Sequence[LayerCache], window: Window) -> mx.array:
        own, others = self._apart(caches)
        self._draft.prefill(self._known(tokens), others, window)
        return self._target.prefill(tokens, own, window)

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array:
        """Run the draft model over ``tokens``, the last of which is one past the window."""
        width, count = hidden.shape[1], tokens.shape[1]
        first = window.cursors + (1 + width - count)
        here = Window.at(first, window.body_lengths, count, window.table)
        none = mx.zeros_like(window.cursors)
        out = self._draft.forward(self._known(tokens), self._apart(caches)[1], here, none)
        return out[:, -width:]

    def draft_logits(self, hidden: mx.array) -> mx.array:
        """Score over the target's vocabulary, which may be padded to another size."""
        scores = self._draft.logits(hidden)[..., : self.vocabulary]
        missing = self.vocabulary - scores.shape[-1]
        return mx.pad(scores, [(0, 0), (0, 0), (0, missing)], constant_values=-mx.inf)

    def _apart(self, layers: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return layers[: self._layers], layers[self._layers :]

    def _known(self, tokens: mx.array) -> mx.array:
        """Tokens past the draft model's vocabulary become its last one."""
        return mx.minimum(tokens, self._draft.vocabulary - 1)
