"""A model of any family of mlx-lm as ragged windows over per-row caches, and what drafts for it.

Copies of mlx-lm's modules run with a view as the cache of each layer, and with products of the
device; see `omlx_worker.engine.models.layer_view`, `recurrent_view`, `layers` and `served_layers`
beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from omlx_worker.engine.caches.attention_cache import AttentionCache, new_arrays
from omlx_worker.engine.caches.recurrent_cache import RecurrentCache
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.window import Window
from omlx_worker.engine.models.embedder import Embedder
from omlx_worker.engine.models.layer_view import LayerView, serve_views
from omlx_worker.engine.models.layers import serve_layers
from omlx_worker.engine.models.recurrent_view import RecurrentView, serve_recurrent_views
from omlx_worker.engine.models.served_layers import copied
from omlx_worker.engine.towers.looks import Looks

LayerCache = AttentionCache | RecurrentCache

Layers = list[list[mx.array]]
"""Arrays of each layer."""

_BACKBONES = ("model", "transformer", "backbone")
"""How mlx-lm's models name the part that their scores are computed from."""


class Unsupported(Exception):
    """A model that has no ragged form. The message completes "because ..."."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention layer's cache: heads, widths of keys and of values, a sliding window's ring."""

    heads: int
    dims: tuple[int, int]
    dtype: mx.Dtype
    ring: int
    kernels: Kernels

    def empty(self, slots: int, capacity: int) -> LayerCache:
        """The caches of free slots, with the pages of `own_pages`."""
        sizes = self.heads, self.dims, self.ring
        return self.wrap(new_arrays(slots, capacity, *sizes, self.dtype))

    def wrap(self, arrays: Sequence[mx.array]) -> LayerCache:
        return AttentionCache(arrays, self.ring, self.kernels.attention)


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """One recurrent layer's states: the shape of a row's, and the type, of each."""

    states: list[tuple[tuple[int, ...], mx.Dtype]]

    @property
    def dtype(self) -> mx.Dtype:
        return self.states[0][1]

    def empty(self, slots: int, capacity: int) -> LayerCache:  # noqa: ARG002
        return self.wrap([mx.zeros((slots, *shape), dtype) for shape, dtype in self.states])

    def wrap(self, arrays: Sequence[mx.array]) -> LayerCache:
        return RecurrentCache(arrays, len(self.states))


LayerShape = AttentionShape | RecurrentShape


class Drafter(Protocol):
    """Drafts for a model.

    Attributes:
        advances: whether a deeper draft is at the position after the one before it. Else all drafts
            of a step are at that of the first.
        layers: what its own layers keep, behind the model's.
        weight_bytes: of weights that are not the model's.
        slow_parts: see `RaggedModel`.
    """

    advances: bool
    layers: Sequence[LayerShape]
    weight_bytes: int
    slow_parts: Sequence[str]

    def read(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> None:
        """Read a window of prompts into the caches; see `RaggedModel.prefill`.

        Args:
            hidden: ``[S, W, hidden]``, what the model made of the window.
            caches: of all layers, here and in `draft`.
        """
        ...

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array:
        """Run over a window.

        Args:
            tokens: ``[S, W + 1]``, the window's first token and the token after each position;
                or one draft deeper, ``[S, 1]``, the draft before.
            hidden: ``[S, W, hidden]`` of the positions, or its own output one deeper.

        Returns:
            ``[S, W, hidden]``, normed: what `logits` scores for the token after each of the last
            ``W`` of ``tokens``.
        """
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Score what `draft` returns, over the model's vocabulary."""
        ...


class _HasRun:
    """A backbone that has run: whatever it is called with, it returns these hidden states."""

    def __init__(self, backbone: nn.Module, hidden: mx.array) -> None:
        self._backbone, self._hidden = backbone, hidden

    def __call__(self, *_: Any, **__: Any) -> mx.array:
        return self._hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)


class RaggedModel:
    """Runs windows of many rows through a loaded model of mlx-lm.

    Args:
        kernels: the forms of its layers' parts.
        drafts: whether its MTP head drafts, if it has one.

    Attributes:
        drafter: its head, or what else drafts for it; None for nothing. Set before the first window
            as ``embedder`` is.
        embedder: makes vectors of what is read; None for a model that generates.
        looks: at pictures, whose vectors are read in place of tokens; None for a model that takes
            none.
        pads: whether recurrent layers hold their states over padding on the right, in `prefill`.

    Raises:
        Unsupported: if its layers keep something else than keys and values or recurrent states.
    """

    embedder: Embedder | None = None
    drafter: Drafter | None = None
    looks: Looks | None = None

    def __init__(self, model: nn.Module, kernels: Kernels, *, drafts: bool = True) -> None:
        layers = make_prompt_cache(model)
        # How many caches each layer has; None if not in a list.
        self._lists = [
            len(layer.caches) if isinstance(layer, CacheList) else None for layer in layers
        ]
        # Never evaluated: only the shapes are wanted.
        try:
            logits = model(mx.zeros((1, 1), mx.int32), cache=layers)
        except Exception as error:  # a family's own code may raise anything
            raise Unsupported(f"its forward fails ({type(error).__name__})") from error
        self._shapes = [_shape(cache, kernels) for cache in _flat(layers)]
        attending = [shape for shape in self._shapes if isinstance(shape, AttentionShape)]
        self.dtype: mx.Dtype = [*attending, *self._shapes][0].dtype
        self.vocabulary: int = logits.shape[-1]
        self._weight_bytes: int = tree_reduce(lambda n, w: n + w.nbytes, model.parameters(), 0)
        self._slow: list[str] = []
        model = copied(model)
        head = getattr(model, "mtp", None)
        # Other recurrent layers may run on over padding.
        self.pads = serve_layers(model, kernels) or len(attending) == len(self._shapes)
        if serve_views(model, kernels):
            self._slow.append("latent attention runs as plain operations")
        if not self.pads:
            serve_recurrent_views(model)
            self._slow.append(
                "prompts of different lengths are read one after the other, because recurrent "
                "layers would take padding for tokens"
            )
        self._scorer = model
        while "language_model" in self._scorer:
            self._scorer = self._scorer.language_model
        self._backbone = next((name for name in _BACKBONES if name in self._scorer), None)
        if drafts and head is not None:
            embed = self._scorer.model.embed_tokens
            self.drafter = _Head(head, embed, attending[-1], self.logits)

    @property
    def weight_bytes(self) -> int:
        """Of its weights, its drafter's and its tower's."""
        of_drafter = self.drafter.weight_bytes if self.drafter else 0
        of_tower = self.looks.tower.weight_bytes if self.looks else 0
        return self._weight_bytes + of_drafter + of_tower

    @property
    def slow_parts(self) -> Sequence[str]:
        """What runs without its fast form, in words."""
        return [*self._slow, *(self.drafter.slow_parts if self.drafter else [])]

    @property
    def layers(self) -> list[LayerShape]:
        """What its layers keep, then what its drafter's do."""
        return [*self._shapes, *(self.drafter.layers if self.drafter else [])]

    def new_caches(self, slots: int, capacity: int) -> list[LayerCache]:
        """Caches of free slots, one for each of `layers`."""
        return [shape.empty(slots, capacity) for shape in self.layers]

    def wrap(self, arrays: Layers) -> list[LayerCache]:
        """Views around the layers' arrays, as a step receives them."""
        return [shape.wrap(part) for part, shape in zip(arrays, self.layers, strict=True)]

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[LayerCache],
        window: Window,
        accepted: mx.array,
    ) -> mx.array:
        """Run one window: ``[S, W]`` tokens to hidden states ``[S, W, hidden]``, as `logits` takes
        them.

        Args:
            accepted: ``[S]`` int32, drafts accepted of each row's last window; of no use to a
                window of prompts.
        """
        if self.embedder and self.embedder.both_ways:
            window = replace(window, both_ways=True)
        views = [
            LayerView(cache, window)
            if isinstance(cache, AttentionCache)
            else RecurrentView(cache, window, accepted)
            for cache in caches[: len(self._shapes)]
        ]
        reader = self._scorer if self._backbone is None else self._scorer[self._backbone]
        nested = self._nested(views)
        if window.seen and self.looks:
            return self.looks.tower.run(reader, tokens, window.seen, nested)
        hidden: mx.array = reader(tokens, cache=nested)
        return hidden

    def prefill(self, tokens: mx.array, caches: Sequence[LayerCache], window: Window) -> mx.array:
        """Read a window of prompts into the caches; returns the same as `forward`.

        Args:
            tokens: ``[S, W + 1]``, the window and the token after each row's part of it.
        """
        hidden = self.forward(tokens[:, :-1], caches, window, window.body_lengths)
        if self.drafter:
            self.drafter.read(tokens, hidden, caches, window)
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Score what `forward` returned, as the model's own forward does after its backbone.

        A model without a known backbone has scored it already.
        """
        if self._backbone is None:
            return hidden
        if hidden.ndim == 2:
            return self.logits(hidden[None])[0]
        scorer = copy(self._scorer)
        scorer[self._backbone] = _HasRun(scorer[self._backbone], hidden)
        logits: mx.array = scorer(mx.zeros(hidden.shape[:2], mx.int32))
        return logits

    def _nested(self, caches: Sequence[Any]) -> list[Any]:
        """One a layer, as the model's modules take them."""
        parts = iter(caches)
        return [
            next(parts) if count is None else tuple(islice(parts, count)) for count in self._lists
        ]


class _Head:
    """The `Drafter` of an MTP head, a layer like the last one of its model that attends.

    Args:
        embed, logits: the model's.
    """

    advances = True
    weight_bytes = 0
    slow_parts: Sequence[str] = ()

    def __init__(
        self,
        head: Any,
        embed: Callable[[mx.array], mx.array],
        layer: LayerShape,
        logits: Callable[[mx.array], mx.array],
    ) -> None:
        self._head, self._embed, self.logits = head, embed, logits
        self.layers: Sequence[LayerShape] = [layer]

    def read(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> None:
        # Nothing takes the output, so only what the head keeps is computed.
        self.draft(tokens, hidden, caches, window)

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array:
        assert isinstance(caches[-1], AttentionCache)
        embedded = self._embed(tokens[:, -hidden.shape[1] :])
        out: mx.array = self._head(embedded, hidden, [LayerView(caches[-1], window)])
        return out


def _flat(layers: Sequence[Any]) -> Iterator[Any]:
    for layer in layers:
        yield from layer.caches if isinstance(layer, CacheList) else [layer]


def _shape(cache: Any, kernels: Kernels) -> AttentionShape | RecurrentShape:
    if isinstance(cache, ArraysCache):
        if any(state is None for state in cache.cache):
            raise Unsupported("its layers use only a part of their states")
        return RecurrentShape([(state.shape[1:], state.dtype) for state in cache.cache])
    kind = type(cache)
    if kind not in (KVCache, RotatingKVCache):
        raise Unsupported(f"its layers keep a {kind.__name__}")
    ring = 0
    if isinstance(cache, RotatingKVCache):
        if cache.keep:
            raise Unsupported(f"its sliding window keeps the first {cache.keep} tokens")
        ring = cache.max_size
    dims = cache.keys.shape[3], cache.values.shape[3]
    return AttentionShape(cache.keys.shape[1], dims, cache.keys.dtype, ring, kernels)
