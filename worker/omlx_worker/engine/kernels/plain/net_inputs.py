"""A gated delta net without its rule and its output projection, by MLX's operations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import normalize_qk
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from omlx_worker.engine.kernels.delta_rule import Inputs, log_decay
from omlx_worker.engine.kernels.plain.products import Product

Projected = tuple[mx.array, ...]
"""A net's projections of its input. The first holds the convolution's inputs, ``[S, W, channels]``
or wider: all that a replay of the convolution needs. Either it also holds the gate of the output,
``b`` and ``a``, or the gate ``[S, W, H, Dv]``, ``a`` and ``b`` ``[S, W, H]`` follow."""


class NetOperations:
    """mlx-lm's gated delta net up to its rule and after it, row by row.

    Args:
        fused: the projections as one product: qkv, z, b and a; None if they cannot be one.
    """

    def __init__(self, module: Any, fused: Product | None = None) -> None:
        self._module = module
        self._fused = fused

    def project(self, x: mx.array) -> Projected:
        if self._fused is not None:
            return (self._fused(x),)
        interleaves = isinstance(self._module, Qwen3NextGatedDeltaNet)
        return _interleaved(self._module, x) if interleaves else _apart(self._module, x)

    def prepare(
        self, projected: Projected, conv: mx.array, past: mx.array | None, accepted: mx.array | None
    ) -> tuple[Inputs, mx.array]:
        """Convolve, normalise and gate.

        Args:
            conv: ``[S, taps, channels]``, the convolution's committed inputs.
            past: the first array of the last window's projections, padded or not; None if no
                draft of it can be accepted.
            accepted: ``[S]`` int32, drafts accepted of the last window; None for a prompt, which
                is committed whole. Of a window only the first position is.

        Returns:
            The rule's inputs, and ``conv`` after the last committed position.
        """
        raw, _, a, b = self._parts(projected)
        taps, prompt = conv.shape[1], accepted is None
        if past is not None and accepted is not None:
            history = mx.concatenate([conv, past[:, 1:, : conv.shape[2]]], axis=1)
            index = accepted[:, None] + mx.arange(taps)
            conv = mx.take_along_axis(history, index[..., None], axis=1)
        inputs = mx.concatenate([conv, raw], axis=1)
        decay = mx.exp(log_decay(self._module, a))
        window = Inputs(*self._convolved(inputs), decay, mx.sigmoid(b))
        # Of a prompt a copy, since a slice would hold on to the whole stretch.
        return window, mx.contiguous(inputs[:, -taps:]) if prompt else inputs[:, 1 : taps + 1]

    def log_decay(self, projected: Projected) -> mx.array:
        return log_decay(self._module, self._parts(projected)[2])

    def gated(self, out: mx.array, projected: Projected) -> mx.array:
        """Norm and gate the rule's outputs ``[S, W, H, Dv]``: ``[S, W, H * Dv]``."""
        normed: mx.array = self._module.norm(out, self._parts(projected)[1])
        return normed.reshape(*out.shape[:2], -1)

    def _parts(self, projected: Projected) -> Projected:
        """The convolution's inputs, the gate, ``a`` and ``b``."""
        if len(projected) > 1:
            return projected
        net, [whole] = self._module, projected
        ends = [net.conv_dim, net.conv_dim + net.value_dim]
        ends += [ends[1] + net.num_v_heads]
        raw, gate, b, a = mx.split(whole, ends, axis=-1)
        return raw, gate.reshape(*gate.shape[:2], net.num_v_heads, net.head_v_dim), a, b

    def _convolved(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries and keys ``[S, W, Hk, Dk]``, normalised, and values ``[S, W, H, Dv]``.

        Args:
            inputs: ``[S, taps + W, channels]``, of the convolution.
        """
        net = self._module
        q, k, v = mx.split(nn.silu(net.conv1d(inputs)), [net.key_dim, 2 * net.key_dim], axis=-1)
        slots, width, _ = v.shape
        q, k = normalize_qk(
            q.reshape(slots, width, net.num_k_heads, net.head_k_dim),
            k.reshape(slots, width, net.num_k_heads, net.head_k_dim),
            inv_scale=net.head_k_dim**-0.5,
            eps=1e-6,
        )
        return q, k, v.reshape(slots, width, net.num_v_heads, net.head_v_dim)


def _apart(module: Any, x: mx.array) -> Projected:
    """The projections of Qwen3.5's net: one product each."""
    gate = module.in_proj_z(x).reshape(*x.shape[:2], module.num_v_heads, module.head_v_dim)
    return module.in_proj_qkv(x), gate, module.in_proj_a(x), module.in_proj_b(x)


def _interleaved(module: Any, x: mx.array) -> Projected:
    """The projections of Qwen3-Next's net: two products, grouped by key head."""
    q, k, v, gate, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(x), module.in_proj_ba(x)
    )
    return mx.concatenate([part.flatten(2) for part in (q, k, v)], axis=-1), gate, a, b
