"""Attention whose sums for a row depend on that row alone, by MLX's operations.

A product over more positions may add them in another order, and so may one over a body and a tail
that meet at another position. So positions are taken in their order, a block of one size at a time,
with a running maximum (online softmax). A block that a row does not see adds zeros and changes no
number, so the capacity of the body does not matter either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.pool import Pair, Pool
from omlx_worker.engine.kernels.window import PAGE, Window

BLOCK = 128
"""Positions of a block."""


@dataclass(frozen=True)
class FixedAttention(PlainAttention):
    """The `Attention` of this module, for steps. All read prompts as `PlainAttention` does."""

    def attend(
        self,
        queries: mx.array,
        pool: Pool,
        tails: Pair,
        window: Window,
        scale: float,
        *,
        sliding: int = 0,
        sinks: mx.array | None = None,
        softcap: float = 0.0,
        rotary: mx.array | None = None,
    ) -> mx.array:
        slots, query_heads, width, _ = queries.shape
        heads = tails[0].shape[1]
        group = query_heads // heads
        asked = [
            (part * scale).reshape(slots, heads, group * width, part.shape[-1])
            for part in (queries, rotary)
            if part is not None
        ]
        places = window.cursors[:, None] + mx.tile(mx.arange(width), group)
        first = mx.maximum(window.cursors - (sliding - 1), 0) if sliding else 0 * window.cursors
        longest = sliding - 1 + width if sliding else window.capacity + window.tail

        peak = mx.full((slots, heads, group * width, 1), -1e30)
        mass = mx.zeros_like(peak)
        if sinks is not None:
            column = mx.repeat(sinks.reshape(heads, group), width, axis=1)[..., None]
            peak, mass = peak * 0 + column.astype(mx.float32), mass + 1
        mixed: Any = 0.0
        for start in range(0, longest, BLOCK):
            positions = first[:, None] + mx.arange(start, start + BLOCK)
            pair = _at(positions, window, pool, tails)
            scores: Any = sum(q @ k.swapaxes(-1, -2) for q, k in zip(asked, pair, strict=False))
            scores = scores.astype(mx.float32)
            if softcap:
                scores = mx.tanh(scores / softcap) * softcap
            seen = positions[:, None] <= places[..., None]
            if sliding:
                seen = seen & (positions[:, None] > places[..., None] - sliding)
            scores = mx.where(seen[:, None], scores, -mx.inf)
            higher = mx.maximum(peak, scores.max(axis=-1, keepdims=True))
            fade, weights = mx.exp(peak - higher), mx.exp(scores - higher)
            peak, mass = higher, mass * fade + weights.sum(axis=-1, keepdims=True)
            values = pair[0 if rotary is not None else 1]
            mixed = mixed * fade + (weights.astype(values.dtype) @ values).astype(mx.float32)
        out: mx.array = (mixed / mass).astype(queries.dtype)
        return out.reshape(slots, query_heads, width, -1)


def _at(positions: mx.array, window: Window, pool: Pool, tails: Pair) -> list[mx.array]:
    """What bodies and tails hold at ``positions`` ``[S, L]`` of each row: ``[S, H, L, D]`` each."""
    lengths = window.body_lengths[:, None]
    if pool.ring:
        inside = mx.minimum(positions % pool.ring, pool.length - 1)
        index = inside[:, None, :, None]
        bodies = [mx.take_along_axis(array, index, axis=2) for array in pool.arrays]
    else:
        inside = mx.minimum(positions, window.capacity - 1)
        pages = mx.take_along_axis(window.table, inside // PAGE, axis=1)
        found = pool.gather((pages, slice(None), inside % PAGE))
        bodies = [array.swapaxes(1, 2) for array in found]
    behind = mx.clip(positions - lengths, 0, tails[0].shape[2] - 1)[:, None, :, None]
    in_body = (positions < lengths)[:, None, :, None]
    return [
        mx.where(in_body, body, mx.take_along_axis(tail, behind, axis=2))
        for body, tail in zip(bodies, tails, strict=True)
    ]
