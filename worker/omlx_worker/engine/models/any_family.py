"""Any family of mlx-lm that keeps keys and values alone, as ragged windows over per-row caches.

mlx-lm's modules run unmodified. Two things are replaced. Each layer gets a `_LayerView` as its
cache: its ``offset`` is each row's cursor, ``update_and_fetch`` stores the window's keys and values
and returns the view in their place, and ``make_mask`` returns the size of the sliding window. And
the function ``scaled_dot_product_attention`` in the modules' own namespaces asks the view instead
of computing, whenever it gets one as keys. So layers that share another's keys and values work too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from omlx_worker.engine.models.ragged_model import LayerCache
from omlx_worker.engine.ragged.attention_cache import AttentionCache
from omlx_worker.engine.ragged.window import Window

_ATTENTION = "scaled_dot_product_attention"


class Unsupported(Exception):
    """A model that has no ragged form. The message completes "because ..."."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """What a layer gets as its mask: the size of its sliding window, 0 for none."""

    sliding: int


class _LayerView:
    """What a module of mlx-lm sees of one layer's cache during one window."""

    def __init__(self, cache: AttentionCache, window: Window) -> None:
        self.offset = window.cursors
        self._cache = cache
        self._window = window

    def make_mask(
        self,
        N: int,  # noqa: ARG002 (mlx-lm's names)
        return_array: bool = False,  # noqa: ARG002
        window_size: int | None = None,
    ) -> _Mask:
        return _Mask(window_size or self._cache.ring)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[_LayerView, _LayerView]:
        self._cache.put(keys, values, self._window)
        return self, self

    def keys_and_values(self) -> tuple[_LayerView, _LayerView]:
        """What layers read that share this one's keys and values."""
        return self, self

    @property
    def dtype(self) -> mx.Dtype:
        return self._cache.tail_values.dtype

    def astype(self, _: mx.Dtype) -> _LayerView:
        """Modules that compute attention in float32 convert keys; the softmax here is precise."""
        return self

    def attend(
        self, queries: mx.array, scale: float, mask: _Mask, sinks: mx.array | None
    ) -> mx.array:
        return self._cache.attend(queries, self._window, scale, sliding=mask.sliding, sinks=sinks)


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
        _replace_attention(model)

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
        views = [_LayerView(cache, window) for cache in caches if isinstance(cache, AttentionCache)]
        logits: mx.array = self._model(tokens, cache=views)
        return logits

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array:
        raise NotImplementedError("the model has no head to draft with")

    def logits(self, hidden: mx.array) -> mx.array:
        """`forward` has scored them already."""
        return hidden


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


def _replace_attention(model: nn.Module) -> None:
    """Make the attention function of the model's modules serve ragged windows too."""
    for module in _modules(model):
        plain = getattr(module, _ATTENTION)
        if not hasattr(plain, "__wrapped__"):
            setattr(module, _ATTENTION, _ragged_or(plain))


def _modules(model: nn.Module) -> Iterator[Any]:
    names = {type(part).__module__ for _, part in model.named_modules()}
    modules = [sys.modules[name] for name in sorted(names)]
    return (module for module in modules if hasattr(module, _ATTENTION))


def _ragged_or(plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @wraps(plain)
    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(keys, _LayerView):
            return keys.attend(queries, scale, mask, sinks)
        return plain(queries, keys, values, cache, scale, mask, sinks)

    return attention
