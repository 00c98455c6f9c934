"""A smaller model of the same vocabulary that drafts for a model.

Its caches are in step with the model's: place ``t`` holds the token at position ``t``. So every
step starts with the pending token, which the target has just read and the draft model may not have:
the row may have joined, or a fold may have dropped what it had read ahead of the cursor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.kernels.window import TAIL, Window
from omlx_worker.engine.models.ragged_model import LayerCache, LayerShape, RaggedModel, Unsupported


class DraftModel:
    """A `Drafter` that is a model itself.

    Args:
        vocabulary: of the model that it drafts for, which may be padded to another size.

    Raises:
        Unsupported: if the draft model has recurrent layers. Those would have to replay the tokens
            of the last window before every draft.
    """

    advances = True

    def __init__(self, draft: RaggedModel, vocabulary: int) -> None:
        if not all(isinstance(cache, AttentionCache) for cache in draft.new_caches(1, TAIL)):
            raise Unsupported("a draft model must keep keys and values alone")
        self._draft, self._vocabulary = draft, vocabulary
        self.weight_bytes = draft.weight_bytes
        self.layers: Sequence[LayerShape] = draft.layers
        self.slow_parts: Sequence[str] = [f"draft model: {part}" for part in draft.slow_parts]

    def read(
        self,
        tokens: mx.array,
        hidden: mx.array,  # noqa: ARG002
        caches: Sequence[LayerCache],
        window: Window,
    ) -> None:
        if window.positions is not None:
            # Those by time: its heads may have another size, and texts are at one place in each.
            window = replace(window, positions=window.positions[..., :1])
        self._draft.prefill(self._known(tokens), self._own(caches), window)

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array:
        """Run the draft model over ``tokens``, the last of which is one past the window."""
        width, count = hidden.shape[1], tokens.shape[1]
        first = window.cursors + (1 + width - count)
        here = window.starting_at(first, count)
        none = mx.zeros_like(window.cursors)
        out = self._draft.forward(self._known(tokens), self._own(caches), here, none)
        return out[:, -width:]

    def logits(self, hidden: mx.array) -> mx.array:
        scores = self._draft.logits(hidden)[..., : self._vocabulary]
        missing = self._vocabulary - scores.shape[-1]
        return mx.pad(scores, [(0, 0), (0, 0), (0, missing)], constant_values=-mx.inf)

    def _own(self, caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
        return caches[len(caches) - len(self.layers) :]

    def _known(self, tokens: mx.array) -> mx.array:
        """Tokens past the draft model's vocabulary become its last one."""
        return mx.minimum(tokens, self._draft.vocabulary - 1)
