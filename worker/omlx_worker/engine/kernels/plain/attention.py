"""Attention of a window to body and tail by MLX's operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from omlx_worker.engine.kernels.attention import Heads, Pair
from omlx_worker.engine.kernels.window import Window, apart


@dataclass(frozen=True)
class PlainAttention:
    """The `Attention` of products and one softmax over body and tail."""

    def put(self, tails: Pair, keys: mx.array, values: mx.array, window: Window) -> Pair:
        tail_keys, tail_values = tails
        return (
            mx.put_along_axis(tail_keys, window.index, mx.nan_to_num(keys), axis=2),
            mx.put_along_axis(tail_values, window.index, mx.nan_to_num(values), axis=2),
        )

    def prepare(
        self, projected: mx.array, heads: Heads, tails: Pair, window: Window
    ) -> tuple[mx.array, Pair]:
        queries, keys, values = heads.split(projected, window.cursors)
        return queries, self.put(tails, keys, values, window)

    def attend(
        self,
        queries: mx.array,
        bodies: Sequence[Pair],
        tails: Pair,
        window: Window,
        scale: float,
        *,
        ring: int = 0,
        sliding: int = 0,
        sinks: mx.array | None = None,
        softcap: float = 0.0,
        rotary: mx.array | None = None,
    ) -> mx.array:
        if window.lengths is not None and rotary is None and not softcap:
            return _of_prompts(queries, bodies, tails, window, scale, ring, sliding, sinks)
        slots, query_heads, width, _ = queries.shape
        heads = tails[0].shape[1]
        group = query_heads // heads
        # Query heads that share a key head become rows of one product: [S, H, G * W, D].
        asked = [
            (part * scale).reshape(slots, heads, group * width, part.shape[-1])
            for part in (queries, rotary)
            if part is not None
        ]
        body_masks, tail_mask = window.masks(sliding, ring)
        split = [*tails, mx.tile(tail_mask, (1, 1, group, 1)), *asked]
        parts = zip(*(apart(array, window.spans) for array in split), strict=True)
        if sliding:
            body_masks = [mx.tile(mask, (1, 1, group, 1)) for mask in body_masks]
        if sinks is not None:
            sinks = mx.repeat(sinks.reshape(heads, group), width, axis=1)[..., None]
        mixed = [
            _mixed(part[3:], [*body, body_mask], part[:3], sinks, softcap)
            for body, body_mask, part in zip(bodies, body_masks, parts, strict=True)
        ]
        whole = mixed[0] if len(mixed) == 1 else mx.concatenate(mixed)
        return whole.reshape(slots, query_heads, width, -1)


def _of_prompts(
    queries: mx.array,
    bodies: Sequence[Pair],
    tails: Pair,
    window: Window,
    scale: float,
    ring: int,
    sliding: int,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of a window of prompts, by MLX's own kernel. Such a batch has one body."""
    [body], width = bodies, window.tail
    filled = min(window.longest, body[0].shape[2])
    pairs = zip(body, tails, strict=True)
    keys, values = (
        mx.concatenate([old[:, :, :filled], new], axis=2) if filled else new for old, new in pairs
    )
    mask: mx.array | str = "causal"
    if not (window.even and (not sliding or window.longest + width <= sliding)):
        [of_body], mask = window.masks(sliding, ring)
        if filled:
            of_body = mx.broadcast_to(of_body[..., :filled], (*mask.shape[:3], filled))
            mask = mx.concatenate([of_body, mask], axis=-1)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


def _mixed(
    queries: Sequence[mx.array],
    body: Sequence[mx.array],
    tail: Sequence[mx.array],
    sinks: mx.array | None,
    softcap: float,
) -> mx.array:
    """Attention of ``[S_g, H, G * W, D]`` queries to one body and its slots' tails.

    Args:
        queries: of the keys, and for latent attention also of the values.
        body, tail: keys, values and mask.
        sinks: ``[H, G * W, 1]``.
    """
    scores = [_scores(queries, part, softcap) for part in (body, tail)]
    if sinks is not None:
        column = mx.broadcast_to(sinks, (*scores[0].shape[:-1], 1))
        scores.append(column.astype(scores[0].dtype))
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1, precise=True)
    mixed = 0 if len(queries) == 2 else 1
    end = body[mixed].shape[2]
    tail_end = end + tail[mixed].shape[2]
    return weights[..., :end] @ body[mixed] + weights[..., end:tail_end] @ tail[mixed]


def _scores(queries: Sequence[mx.array], part: Sequence[mx.array], softcap: float) -> mx.array:
    """Scores of a body or tail, masked, ``[S_g, H, G * W, L]``."""
    *arrays, mask = part
    scores = sum(q @ k.swapaxes(-1, -2) for q, k in zip(queries, arrays, strict=False))
    assert isinstance(scores, mx.array)
    if softcap:
        scores = mx.tanh(scores / softcap) * softcap
    return mx.where(mask, scores, mx.finfo(scores.dtype).min)
