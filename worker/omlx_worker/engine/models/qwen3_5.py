"""Qwen3.5, dense and mixture of experts, and Qwen3-Next as ragged windows over per-row caches.

Weights, norms, experts and rotations are those of mlx-lm's modules. The forwards of attention, the
gated delta net and dense MLPs are this project's own (`omlx_worker.engine.models.layers`): mlx-lm's
take positions from one shared cache offset, and products run as the device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.recurrent_cache import RecurrentCache
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.window import Window
from omlx_worker.engine.models.layers import Layer
from omlx_worker.engine.models.mtp import text_model
from omlx_worker.engine.models.ragged_model import LayerCache


class RaggedQwen35:
    """A `RaggedModel` around a loaded ``qwen3_5``, ``qwen3_5_moe`` or ``qwen3_next`` model.

    Args:
        drafts: whether to use the model's MTP head, if it has one.
        kernels: the forms of its layers' parts.
    """

    embedder = None

    def __init__(self, model: nn.Module, kernels: Kernels, *, drafts: bool = True) -> None:
        self._text = text_model(model)
        self._args = self._text.args
        self._head = getattr(model, "mtp", None) if drafts else None
        self.dtype: mx.Dtype = self._text.model.norm.weight.dtype
        self._attention = kernels.attention
        tied = self._args.tie_word_embeddings
        self._scores = kernels.product(
            self._text.model.embed_tokens if tied else self._text.lm_head
        )
        self._layers = [Layer(layer, kernels) for layer in self._text.layers]
        self._head_layers: list[Layer] = []
        if self._head is not None:
            self._head_layers = [Layer(layer, kernels) for layer in self._head.layers]
            self._mix = kernels.product(self._head.fc)
        self.vocabulary: int = self._args.vocab_size
        self.slow_parts: Sequence[str] = ()
        self.weight_bytes: int = tree_reduce(lambda n, w: n + w.nbytes, model.parameters(), 0)

    @property
    def drafts(self) -> bool:
        return self._head is not None

    advances = pads = True

    def new_caches(self, slots: int, capacity: int) -> list[LayerCache]:
        layers = [*self._layers, *self._head_layers]
        return [self._new_cache(layer.module, slots, capacity) for layer in layers]

    def _new_cache(self, layer: Any, slots: int, capacity: int) -> LayerCache:
        if not layer.is_linear:
            heads, dim = self._args.num_key_value_heads, self._args.head_dim
            return AttentionCache.empty(
                slots, heads, capacity, (dim, dim), self.dtype, attention=self._attention
            )
        net = layer.linear_attn
        taps = net.conv_kernel_size - 1
        return RecurrentCache(
            [
                mx.zeros((slots, taps, net.conv_dim), self.dtype),
                mx.zeros((slots, net.num_v_heads, net.head_v_dim, net.head_k_dim), mx.float32),
            ]
        )

    def wrap(self, arrays: Sequence[Sequence[mx.array]]) -> list[LayerCache]:
        layers = [*self._layers, *self._head_layers]
        return [
            RecurrentCache(part)
            if layer.module.is_linear
            else AttentionCache(part, attention=self._attention)
            for layer, part in zip(layers, arrays, strict=True)
        ]

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[LayerCache],
        window: Window,
        accepted: mx.array,
    ) -> mx.array:
        hidden = self._text.model.embed_tokens(tokens)
        for layer, cache in zip(self._layers, caches, strict=False):
            hidden = layer(hidden, cache, window, accepted)
        normed: mx.array = self._text.model.norm(hidden)
        return normed

    def prefill(self, tokens: mx.array, caches: Sequence[LayerCache], window: Window) -> mx.array:
        hidden = self.forward(tokens[:, :-1], caches, window, window.body_lengths)
        if self._head is not None:
            # Nothing takes the output, so only the head's keys and values are computed.
            self.draft(tokens, hidden, caches, window)
        return hidden

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array:
        assert self._head is not None
        embedded = self._text.model.embed_tokens(tokens[:, -hidden.shape[1] :])
        x = self._mix(self._head.inputs(embedded, hidden))
        behind = caches[len(self._layers) :]
        for layer, cache in zip(self._head_layers, behind, strict=True):
            x = layer(x, cache, window, None)
        out: mx.array = self._head.norm(x)
        return out

    def logits(self, hidden: mx.array) -> mx.array:
        return self._scores(hidden)

    draft_logits = logits
