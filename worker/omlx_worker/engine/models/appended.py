"""A model of any family for which the layer drafts that its checkpoint appends to the model's."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.window import Window
from omlx_worker.engine.models.any_family import AnyFamily
from omlx_worker.engine.models.layer_view import LayerView
from omlx_worker.engine.models.ragged_model import LayerCache


class WithAppendedLayer(AnyFamily):
    """A `RaggedModel` that drafts by its MTP head, a layer like the last of its own."""

    drafts = True

    def __init__(self, model: nn.Module, kernels: Kernels) -> None:
        super().__init__(model, kernels)
        self._shapes.append(self._shapes[-1])

    def prefill(self, tokens: mx.array, caches: Sequence[LayerCache], window: Window) -> mx.array:
        hidden = super().prefill(tokens, caches, window)
        # Nothing takes the output, so only what the layer keeps is computed.
        self.draft(tokens, hidden, caches, window)
        return hidden

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array:
        embedded = self._scorer.model.embed_tokens(tokens[:, -hidden.shape[1] :])
        assert isinstance(caches[-1], AttentionCache)
        out: mx.array = self._scorer.mtp(embedded, hidden, [LayerView(caches[-1], window)])
        return out
