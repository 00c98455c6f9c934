"""Any family of mlx-lm that keeps keys and values alone, as ragged windows over per-row caches.

mlx-lm's modules run unmodified, with a `LayerView` as the cache of each layer; see
`omlx_worker.engine.models.layer_view`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from omlx_worker.engine.models.layer_view import LayerView, serve_views
from omlx_worker.engine.models.ragged_model import LayerCache
from omlx_worker.engine.ragged.attention_cache import AttentionCache
from omlx_worker.engine.ragged.window import Window


class Unsupported(Exception):
    """A model that has no ragged form. The message completes "because ..."."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """One layer's cache: heads, width of keys and of values, and the ring of a sliding window."""

    heads: int
    dims: tuple[int, int]
    ring: int


class AnyFamily:
    """A `RaggedModel` around a loaded model of mlx-lm. `RaggedQwen35` documents the methods.

    Raises:
        Unsupported: if its layers keep something else than keys and values.
    """

    drafts = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        caches = make_prompt_cache(model)
        strange = {type(cache).__name__ for cache in caches} - {"KVCache", "RotatingKVCache"}
        if strange:
            raise Unsupported(f"its layers keep a {', '.join(sorted(strange))}")
        # Never evaluated: only the shapes are wanted.
        logits = model(mx.zeros((1, 1), mx.int32), cache=caches)
        self._shapes = [_shape(cache) for cache in caches]
        self.dtype: mx.Dtype = caches[0].keys.dtype
        self.vocabulary: int = logits.shape[-1]
        self.weight_bytes: int = tree_reduce(lambda n, w: n + w.nbytes, model.parameters(), 0)
        serve_views(model)

    def new_prompt_cache(self) -> list[KVCache | RotatingKVCache]:
        caches: list[KVCache | RotatingKVCache] = make_prompt_cache(self._model)
        return caches

    def prefill(
        self,
        tokens: mx.array,
        following: mx.array,  # noqa: ARG002
        caches: Sequence[KVCache | RotatingKVCache],
    ) -> None:
        # Nothing takes the logits, so they are not computed.
        self._model(tokens, cache=caches)

    def prompt_arrays(self, caches: Sequence[KVCache | RotatingKVCache]) -> list[list[mx.array]]:
        return [
            []
            if cache.empty()
            else _ring_of(cache)
            if isinstance(cache, RotatingKVCache)
            else list(cache.keys_and_values())
            for cache in caches
        ]

    def new_caches(self, slots: int, capacity: int) -> list[LayerCache]:
        return [
            AttentionCache.empty(slots, shape.heads, capacity, shape.dims, self.dtype, shape.ring)
            for shape in self._shapes
        ]

    def wrap(self, arrays: Sequence[Sequence[mx.array]]) -> list[LayerCache]:
        return [
            AttentionCache(part, shape.ring)
            for part, shape in zip(arrays, self._shapes, strict=True)
        ]

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[LayerCache],
        window: Window,
        accepted: mx.array,  # noqa: ARG002
    ) -> mx.array:
        """Run one window: ``[S, W]`` tokens to logits ``[S, W, vocabulary]``."""
        views = [LayerView(cache, window) for cache in caches if isinstance(cache, AttentionCache)]
        logits: mx.array = self._model(tokens, cache=views)
        return logits

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array:
        raise NotImplementedError("the model has no head to draft with")

    def logits(self, hidden: mx.array) -> mx.array:
        """`forward` has scored them already."""
        return hidden

    draft_logits = logits


def _shape(cache: KVCache | RotatingKVCache) -> _Shape:
    ring = 0
    if isinstance(cache, RotatingKVCache):
        if cache.keep:
            raise Unsupported(f"its sliding window keeps the first {cache.keep} tokens")
        ring = cache.max_size
    dims = cache.keys.shape[3], cache.values.shape[3]
    return _Shape(cache.keys.shape[1], dims, ring)


def _ring_of(cache: RotatingKVCache) -> list[mx.array]:
    """Keys and values of a prompt, ``[1, H, L, D]``, each position at its index in the ring."""
    ring, length = cache.max_size, cache.offset
    latest = min(ring, length)
    arrays = (cache._temporal_order(array) for array in (cache.keys, cache.values))
    return [mx.roll(array[..., -latest:, :], (length - latest) % ring, 2) for array in arrays]
