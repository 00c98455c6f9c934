"""What mlx-lm's modules see of one layer's ragged cache during one window.

A `LayerView` stands in for the cache: its ``offset`` is each row's turn, ``update_and_fetch``
stores the window's keys and values and returns the view in their place, and ``make_mask`` returns
the size of the sliding window. `serve_views` makes the function ``scaled_dot_product_attention`` in
the modules' own namespaces ask the view instead of computing, whenever it gets one as keys. So
layers that share another's keys and values work too. Attention that a family computes by itself
gets a ragged forward here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.window import Window
from omlx_worker.engine.models.recurrent_view import RecurrentView
from omlx_worker.engine.models.rotary import STANDARD, attend, serve_rotary
from omlx_worker.engine.models.served_layers import serve_products

_ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class _Mask:
    """What a layer gets as its mask: the size of its sliding window, 0 for none."""

    sliding: int


class LayerView:
    """One layer's cache, for one window."""

    def __init__(self, cache: AttentionCache, window: Window) -> None:
        self.offset = window.turns
        self.cache = cache
        self.window = window

    def make_mask(
        self,
        N: int,  # noqa: ARG002 (mlx-lm's names)
        return_array: bool = False,  # noqa: ARG002
        window_size: int | None = None,
    ) -> _Mask:
        ring = self.cache.pool.ring
        size = window_size or ring
        # plamo3 asks for a position more than its cache keeps, and sees it in a prompt alone.
        return _Mask(min(size, ring) if ring and self.window.lengths is None else size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[LayerView, LayerView]:
        self.cache.put(keys, values, self.window)
        return self, self

    def keys_and_values(self) -> tuple[LayerView, LayerView]:
        """What gemma3n's layers read that share this one's keys and values."""
        return self, self

    @property
    def dtype(self) -> mx.Dtype:
        return self.cache.tails[1].dtype

    def astype(self, _: mx.Dtype) -> LayerView:
        """Modules that compute attention in float32 convert keys; the softmax here is precise."""
        return self

    def attend(self, queries: mx.array, scale: float, mask: _Mask, **options: Any) -> mx.array:
        """See `AttentionCache.attend`."""
        return self.cache.attend(queries, self.window, scale, sliding=mask.sliding, **options)


def serve_views(model: nn.Module, kernels: Kernels) -> bool:
    """Make the model's modules accept a `LayerView` wherever they accept a cache.

    Returns:
        Whether some of them attend to latents, which no kernel takes.
    """
    latent = False
    for part in model.modules():
        if type(part) in STANDARD:
            serve_rotary(part, kernels)
            add_forward(type(part), _rotary_attention)
        else:
            serve_products(part, kernels)
    for part in {type(part): part for _, part in model.named_modules()}.values():
        module = sys.modules[type(part).__module__]
        plain = getattr(module, _ATTENTION, None)
        if plain is not None and not hasattr(plain, "__wrapped__"):
            setattr(module, _ATTENTION, _attention_or(plain))
        if "embed_q" in part and "unembed_out" in part:
            add_forward(type(part), _latent_attention)
            latent = True
        elif "qkv_proj" in part and "q_weight" in part:
            add_forward(type(part), _weighted_attention)
    return latent


def _attention_or(plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
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
        if isinstance(keys, LayerView):
            return keys.attend(queries, scale, mask, sinks=sinks)
        return plain(queries, keys, values, cache, scale, mask, sinks)

    return attention


def add_forward(kind: type[nn.Module], ragged: Callable[..., mx.array]) -> None:
    """Let a class run ``ragged`` whenever its cache is a view."""
    plain: Any = kind.__call__
    if hasattr(plain, "__wrapped__"):
        return

    signature = inspect.signature(plain)

    @wraps(plain)
    def forward(*args: Any, **options: Any) -> mx.array:
        given = signature.bind(*args, **options).arguments
        if isinstance(given.get("cache"), LayerView | RecurrentView):
            module, x, *scale, mask, view = given.values()
            return ragged(module, x, mask, view, *scale)
        out: mx.array = plain(*args, **options)
        return out

    kind.__call__ = forward


def _rotary_attention(module: Any, x: mx.array, mask: _Mask, view: LayerView) -> mx.array:
    """The attention of families that are alike, see `omlx_worker.engine.models.rotary`."""
    return attend(module, x, view.cache, view.window, mask.sliding)


def _weighted_attention(module: Any, x: mx.array, mask: _Mask, view: LayerView) -> mx.array:
    """plamo2's attention, which norms each head by weights of its own."""
    parts = module.qkv_proj(x).reshape(*x.shape[:2], -1, module.qk_dim).swapaxes(1, 2)
    ends = [module.q_num_heads, module.q_num_heads + module.k_num_heads]
    queries, keys, values = mx.split(parts, ends, axis=1)
    queries, keys = (
        module.rope(mx.fast.rms_norm(heads, None, 1e-6) * weight[:, None], offset=view.offset)
        for heads, weight in ((queries, module.q_weight), (keys, module.k_weight))
    )
    view.update_and_fetch(keys, values)
    mixed = view.attend(queries, module.scale, mask)
    out: mx.array = module.o_proj(mixed.swapaxes(1, 2).reshape(*x.shape[:2], -1))
    return out


def _latent_attention(
    module: Any, x: mx.array, mask: _Mask, view: LayerView, scale: mx.array | None = None
) -> mx.array:
    """DeepSeek's attention over compressed keys and values, as it computes a single token.

    Args:
        scale: ``[S, 1, W, 1]``, a factor for the queries of each position, as in mistral4.
    """
    slots, width, _ = x.shape
    rotated = getattr(module, "rope", lambda part, _: part)
    latent, key = mx.split(module.kv_a_proj_with_mqa(x), [module.kv_lora_rank], axis=-1)
    latent = _scaled(module.kv_a_layernorm(latent), getattr(module, "mla_scale_kv_lora", None))
    if getattr(module, "q_lora_rank", None) is None:
        q = module.q_proj(x)
    else:
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x)))
    q = _scaled(q, getattr(module, "mla_scale_q_lora", None))
    q = q.reshape(slots, width, -1, module.qk_nope_head_dim + key.shape[-1]).swapaxes(1, 2)
    queries, rotary = mx.split(_scaled(q, scale), [module.qk_nope_head_dim], axis=-1)
    view.update_and_fetch(latent[:, None], rotated(key[:, None], view.offset))
    mixed = view.attend(
        module.embed_q(queries), module.scale, mask, rotary=rotated(rotary, view.offset)
    )
    values = module.unembed_out(mixed).swapaxes(1, 2)
    if "g_proj" in module:
        # Of a head or of each of its values.
        gate = mx.sigmoid(module.g_proj(x))
        values = values * gate.reshape(*values.shape[:3], -1)
    project = module.o_proj if "o_proj" in module else module.dense
    out: mx.array = project(values.reshape(slots, width, -1))
    return out


def _scaled(x: mx.array, factor: mx.array | float | None) -> mx.array:
    return x if factor is None else x * factor
