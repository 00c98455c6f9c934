"""The layers of the Qwen3.5 family over a ragged window: what mlx-lm computes, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import normalize_qk

from omlx_worker.engine.kernels.delta_rule import (
    Inputs,
    Kept,
    gates,
    log_decay,
    read,
    replay_and_run,
)
from omlx_worker.engine.models.fused import product
from omlx_worker.engine.ragged.attention_cache import AttentionCache, Window
from omlx_worker.engine.ragged.recurrent_cache import RecurrentCache

Projected = tuple[mx.array, mx.array, mx.array, mx.array]
"""What a gated delta net makes of its input: conv inputs ``[S, W, channels]``, the output's gate
``[S, W, H, Dv]``, and the inputs ``a`` and ``b`` ``[S, W, H]`` of the state's gates."""


def attention(
    module: Any,
    x: mx.array,
    cache: AttentionCache,
    window: Window,
    added: mx.array,
    fused: nn.Module | None = None,
) -> mx.array:
    """Gated full attention, ``[S, W, hidden]`` in and out; mlx-lm's `Qwen3NextAttention`.

    Args:
        added: the residual stream, ``[S, W, hidden]``, which the result is added to.
        fused: its projections of ``x`` side by side, where they are fused.
    """
    slots, width, _ = x.shape
    heads, key_heads = module.num_attention_heads, module.num_key_value_heads
    if fused is None:
        q, k, v = module.q_proj(x), module.k_proj(x), module.v_proj(x)
    else:
        ends = [2 * heads * module.head_dim, (2 * heads + key_heads) * module.head_dim]
        q, k, v = mx.split(product(fused, x), ends, axis=-1)
    queries, gate = mx.split(q.reshape(slots, width, heads, -1), 2, axis=-1)
    keys = module.k_norm(k.reshape(slots, width, key_heads, -1))
    values = v.reshape(slots, width, key_heads, -1)
    queries = module.rope(module.q_norm(queries).swapaxes(1, 2), offset=window.cursors)
    keys = module.rope(keys.swapaxes(1, 2), offset=window.cursors)
    mixed = cache.attend(queries, keys, values.swapaxes(1, 2), window, module.scale)
    mixed = mixed.swapaxes(1, 2).reshape(slots, width, -1)
    return product(module.o_proj, mixed * mx.sigmoid(gate.reshape(slots, width, -1)), added)


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
    raw, gate, a, b = project(module, x)
    taps = module.conv_kernel_size - 1
    inputs = mx.concatenate([_committed_conv(cache, accepted, taps), raw], axis=1)
    window = Inputs(*_convolved(module, inputs), *gates(module, a, b))
    kept = Kept(*cache.kept[1:]) if cache.kept else None
    out, state = replay_and_run(window, kept, accepted, cache.state)
    cache.conv, cache.state = inputs[:, 1 : taps + 1], state
    cache.kept = [raw, *window.kept]
    return _gated_output(module, out, gate)


def gated_delta_net_of_prompt(
    module: Any,
    x: mx.array,
    cache: ArraysCache,
    project: Callable[[Any, mx.array], Projected],
) -> mx.array:
    """The recurrent layer over a stretch of one prompt, ``[1, T, hidden]`` in and out.

    Args:
        cache: mlx-lm's, of the conv inputs ``[1, kernel - 1, channels]`` and the state
            ``[1, H, Dv, Dk]`` float32, or of nothing before the first stretch.
    """
    raw, gate, a, b = project(module, x)
    taps = module.conv_kernel_size - 1
    conv, state = cache[0], cache[1]
    if conv is None:
        conv = mx.zeros((1, taps, module.conv_dim), x.dtype)
        state = mx.zeros((1, module.num_v_heads, module.head_v_dim, module.head_k_dim), mx.float32)
    inputs = mx.concatenate([conv, raw], axis=1)
    prompt = Inputs(*_convolved(module, inputs), *gates(module, a, b))
    out, cache[1] = read(prompt, log_decay(module, a), state)
    # A copy, since a slice would hold on to the whole stretch.
    cache[0] = mx.contiguous(inputs[:, -taps:])
    return _gated_output(module, out, gate)


def _convolved(module: Any, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries and keys ``[S, W, Hk, Dk]``, normalised, and values ``[S, W, H, Dv]``.

    Args:
        inputs: ``[S, kernel - 1 + W, channels]``, of the convolution.
    """
    q, k, v = mx.split(
        nn.silu(module.conv1d(inputs)), [module.key_dim, 2 * module.key_dim], axis=-1
    )
    slots, width, _ = v.shape
    q, k = normalize_qk(
        q.reshape(slots, width, module.num_k_heads, module.head_k_dim),
        k.reshape(slots, width, module.num_k_heads, module.head_k_dim),
        inv_scale=module.head_k_dim**-0.5,
        eps=1e-6,
    )
    return q, k, v.reshape(slots, width, module.num_v_heads, module.head_v_dim)


def _gated_output(module: Any, out: mx.array, gate: mx.array) -> mx.array:
    """Norm, gate and project what the state's readers ``[S, W, H, Dv]`` say."""
    slots, width = out.shape[:2]
    mixed: mx.array = module.out_proj(module.norm(out, gate).reshape(slots, width, -1))
    return mixed


def _committed_conv(cache: RecurrentCache, accepted: mx.array, taps: int) -> mx.array:
    """The conv inputs ``[S, taps, channels]`` that precede a window: the last ones committed."""
    if not cache.kept:
        return cache.conv
    history = mx.concatenate([cache.conv, cache.kept[0][:, 1:]], axis=1)
    index = accepted[:, None] + mx.arange(taps)
    return mx.take_along_axis(history, index[..., None], axis=1)
