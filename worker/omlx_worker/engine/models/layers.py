"""The layers of the Qwen3.5 family over a ragged window: what mlx-lm computes, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

from omlx_worker.engine.attention_cache import AttentionCache, Window
from omlx_worker.engine.recurrent_cache import RecurrentCache

Projected = tuple[mx.array, mx.array, mx.array, mx.array]
"""What a gated delta net makes of its input: conv inputs ``[S, W, channels]``, the output's gate
``[S, W, H, Dv]``, and the inputs ``a`` and ``b`` ``[S, W, H]`` of the state's gates."""


def attention(module: Any, x: mx.array, cache: AttentionCache, window: Window) -> mx.array:
    """Gated full attention, ``[S, W, hidden]`` in and out; mlx-lm's `Qwen3NextAttention`."""
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


def projected_apart(module: Any, x: mx.array) -> Projected:
    """The projections of a Qwen3.5, one product each."""
    gate = module.in_proj_z(x).reshape(*x.shape[:2], module.num_v_heads, module.head_v_dim)
    return module.in_proj_qkv(x), gate, module.in_proj_a(x), module.in_proj_b(x)


def gated_delta_net(
    module: Any,
    x: mx.array,
    cache: RecurrentCache,
    accepted: mx.array,
    project: Callable[[Any, mx.array], Projected],
) -> mx.array:
    """The recurrent layer, ``[S, W, hidden]`` in and out; mlx-lm's `GatedDeltaNet`.

    First the accepted drafts of the last window are replayed from their kept inputs, together
    with this window's first token, which is committed whatever becomes of the rest; the state
    after it is the one kept. Then the rest of the window runs on from there, and the state that
    it reaches is thrown away.

    Args:
        accepted: ``[S]`` int32, drafts accepted of each row's last window.
        project: the family's projections.
    """
    slots, width, _ = x.shape
    raw, gate, a, b = project(module, x)
    taps = module.conv_kernel_size - 1
    inputs = mx.concatenate([_committed_conv(cache, accepted, taps), raw], axis=1)
    q, k, v = mx.split(
        nn.silu(module.conv1d(inputs)), [module.key_dim, 2 * module.key_dim], axis=-1
    )
    q, k = normalize_qk(
        q.reshape(slots, width, module.num_k_heads, module.head_k_dim),
        k.reshape(slots, width, module.num_k_heads, module.head_k_dim),
        inv_scale=module.head_k_dim**-0.5,
        eps=1e-6,
    )
    v = v.reshape(slots, width, module.num_v_heads, module.head_v_dim)

    def run(parts: list[mx.array], state: mx.array, mask: mx.array | None) -> Any:
        return gated_delta_update(*parts, module.A_log, module.dt_bias, state, mask)

    lead = [part[:, :1] for part in (q, k, v, a, b)]
    mask = None
    if cache.kept:
        _, kept_k, kept_v, kept_a, kept_b = cache.kept
        depth = kept_k.shape[1]
        # What a replay outputs is not needed, so keys stand in for its queries.
        replayed = [kept_k, kept_k, kept_v, kept_a, kept_b]
        lead = [mx.concatenate(list(pair), axis=1) for pair in zip(replayed, lead, strict=True)]
        mask = mx.arange(depth + 1) < accepted[:, None]
        mask = mask | (mx.arange(depth + 1) == depth)
    out, state = run(lead, cache.state, mask)
    out = out[:, -1:]
    if width > 1:
        rest, _ = run([part[:, 1:] for part in (q, k, v, a, b)], state, None)
        out = mx.concatenate([out, rest], axis=1)
    cache.conv, cache.state = inputs[:, 1 : taps + 1], state
    cache.kept = [part[:, 1:] for part in (raw, k, v, a, b)] if width > 1 else []

    mixed: mx.array = module.out_proj(module.norm(out, gate).reshape(slots, width, -1))
    return mixed


def _committed_conv(cache: RecurrentCache, accepted: mx.array, taps: int) -> mx.array:
    """The conv inputs ``[S, taps, channels]`` that precede a window: the last ones committed."""
    if not cache.kept:
        return cache.conv
    history = mx.concatenate([cache.conv, cache.kept[0]], axis=1)
    index = accepted[:, None] + mx.arange(taps)
    return mx.take_along_axis(history, index[..., None], axis=1)
