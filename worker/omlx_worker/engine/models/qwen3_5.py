"""The Qwen3.5 family, dense and mixture of experts, as ragged windows over per-row caches.

mlx-lm's modules and weights are kept: projections, experts, norms, rope. Only the forwards of
attention and of the gated delta net are this project's own, because mlx-lm's take their
positions from one shared cache offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

from omlx_worker.engine.cache import AttentionCache, RecurrentCache, Window

LayerCache = AttentionCache | RecurrentCache


class RaggedQwen35:
    """A `RaggedModel` (see `omlx_worker.engine.models`) around a loaded ``qwen3_5`` model."""

    def __init__(self, model: nn.Module) -> None:
        self._text = model.language_model
        self._args = self._text.args
        self.dtype: mx.Dtype = self._text.model.norm.weight.dtype
        self.vocabulary: int = self._args.vocab_size

    # Prefill: one row, mlx-lm's own forward and caches.

    def new_prompt_cache(self) -> list[KVCache | ArraysCache]:
        caches: list[KVCache | ArraysCache] = self._text.make_cache()
        return caches

    def prefill(self, tokens: mx.array, caches: Sequence[KVCache | ArraysCache]) -> mx.array:
        """Read ``[1, T]`` tokens into a prompt's caches; returns ``[1, T, hidden]``, normed."""
        hidden: mx.array = self._text.model(tokens, cache=caches)
        return hidden

    def prompt_arrays(self, caches: Sequence[KVCache | ArraysCache]) -> list[list[mx.array]]:
        """What each layer's `write` takes from a prompt's caches."""
        return [
            list(cache.keys_and_values()) if isinstance(cache, KVCache) else [cache[0], cache[1]]
            for cache in caches
        ]

    # Decoding: many rows, this project's caches.

    def new_caches(self, slots: int, capacity: int) -> list[LayerCache]:
        return [self._new_cache(layer, slots, capacity) for layer in self._text.layers]

    def _new_cache(self, layer: Any, slots: int, capacity: int) -> LayerCache:
        if not layer.is_linear:
            heads, dim = self._args.num_key_value_heads, self._args.head_dim
            return AttentionCache.empty(slots, heads, capacity, dim, dim, self.dtype)
        net = layer.linear_attn
        kept = net.conv_kernel_size - 1
        return RecurrentCache(
            [
                mx.zeros((slots, kept, net.conv_dim), self.dtype),
                mx.zeros((slots, net.num_v_heads, net.head_v_dim, net.head_k_dim), mx.float32),
            ]
        )

    def wrap(self, arrays: Sequence[Sequence[mx.array]]) -> list[LayerCache]:
        """Views around the layers' arrays, as a step receives them."""
        return [
            RecurrentCache(part) if layer.is_linear else AttentionCache(part)
            for layer, part in zip(self._text.layers, arrays, strict=True)
        ]

    def forward(self, tokens: mx.array, caches: Sequence[LayerCache], window: Window) -> mx.array:
        """Run one window: ``[S, W]`` tokens to normed hidden states ``[S, W, hidden]``."""
        hidden = self._text.model.embed_tokens(tokens)
        for layer, cache in zip(self._text.layers, caches, strict=True):
            x = layer.input_layernorm(hidden)
            if isinstance(cache, RecurrentCache):
                hidden = hidden + _gated_delta_net(layer.linear_attn, x, cache)
            else:
                hidden = hidden + _attention(layer.self_attn, x, cache, window)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed: mx.array = self._text.model.norm(hidden)
        return normed

    def logits(self, hidden: mx.array) -> mx.array:
        """Score hidden states: ``[..., hidden]`` to ``[..., vocabulary]``."""
        scores: mx.array
        if self._args.tie_word_embeddings:
            scores = self._text.model.embed_tokens.as_linear(hidden)
        else:
            scores = self._text.lm_head(hidden)
        return scores


def _attention(module: Any, x: mx.array, cache: AttentionCache, window: Window) -> mx.array:
    """Gated full attention of a window; the counterpart of mlx-lm's `Qwen3NextAttention`."""
    slots, width, _ = x.shape
    heads, key_heads = module.num_attention_heads, module.num_key_value_heads
    queries, gate = mx.split(module.q_proj(x).reshape(slots, width, heads, -1), 2, axis=-1)
    keys = module.k_norm(module.k_proj(x).reshape(slots, width, key_heads, -1))
    values = module.v_proj(x).reshape(slots, width, key_heads, -1)
    queries = module.rope(module.q_norm(queries).swapaxes(1, 2), offset=window.cursors)
    keys = module.rope(keys.swapaxes(1, 2), offset=window.cursors)
    mixed = cache.attend(queries, keys, values.swapaxes(1, 2), window, module.scale)
    mixed = mixed.swapaxes(1, 2).reshape(slots, width, -1)
    out: mx.array = module.o_proj(mixed * mx.sigmoid(gate.reshape(slots, width, -1)))
    return out


def _gated_delta_net(module: Any, x: mx.array, cache: RecurrentCache) -> mx.array:
    """The recurrent layer of a window; the counterpart of mlx-lm's `GatedDeltaNet`."""
    slots, width, _ = x.shape
    inputs = mx.concatenate([cache.conv, module.in_proj_qkv(x)], axis=1)
    mixed = nn.silu(module.conv1d(inputs))
    q, k, v = mx.split(mixed, [module.key_dim, 2 * module.key_dim], axis=-1)
    q, k = normalize_qk(
        q.reshape(slots, width, module.num_k_heads, module.head_k_dim),
        k.reshape(slots, width, module.num_k_heads, module.head_k_dim),
        inv_scale=module.head_k_dim**-0.5,
        eps=1e-6,
    )
    out, state = gated_delta_update(
        q,
        k,
        v.reshape(slots, width, module.num_v_heads, module.head_v_dim),
        module.in_proj_a(x),
        module.in_proj_b(x),
        module.A_log,
        module.dt_bias,
        cache.state,
    )
    cache.conv = inputs[:, width:]
    cache.state = state
    z = module.in_proj_z(x).reshape(slots, width, module.num_v_heads, module.head_v_dim)
    projected: mx.array = module.out_proj(module.norm(out, z).reshape(slots, width, -1))
    return projected
