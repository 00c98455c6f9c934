"""Attention of a window to body and tail by MLX's operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from omlx_worker.engine.kernels.attention import Heads
from omlx_worker.engine.kernels.pool import Pair, Pool
from omlx_worker.engine.kernels.window import PAGE, Window


@dataclass(frozen=True)
class PlainAttention:
    """The `Attention` of products over whole arrays: copies of the rows' pages, and all tails.

    Windows of prompts take their own pages alone, by MLX's kernel where it can.
    """

    def put(self, tails: Pair, keys: mx.array, values: mx.array, window: Window) -> Pair:
        tail_keys, tail_values = tails
        return (
            mx.put_along_axis(tail_keys, window.index, mx.nan_to_num(keys), axis=2),
            mx.put_along_axis(tail_values, window.index, mx.nan_to_num(values), axis=2),
        )

    def prepare(
        self, projected: mx.array, heads: Heads, tails: Pair, window: Window
    ) -> tuple[mx.array, Pair]:
        queries, keys, values = heads.split(projected, window)
        return queries, self.put(tails, keys, values, window)

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
        if window.lengths is not None and rotary is None and not softcap:
            return _of_prompts(queries, pool, tails, window, scale, sliding, sinks)
        slots, query_heads, width, _ = queries.shape
        heads = tails[0].shape[1]
        group = query_heads // heads
        # Query heads that share a key head become rows of one product: [S, H, R, D].
        asked = [
            (part * scale).reshape(slots, heads, group * width, part.shape[-1])
            for part in (queries, rotary)
            if part is not None
        ]
        body_mask, tail_mask = window.masks(sliding, pool.ring)
        owners = None
        if pool.ring:
            bodies = pool.gather()
        else:
            pages, owners, body_mask = window.listed(sliding)
            bodies = pool.gather(pages)
        parts = [_Part(bodies, body_mask, owners), _Part(tails, tail_mask)]
        scores = [_scores(asked, part, group, softcap) for part in parts]
        peaks = [_most(each, part, slots) for each, part in zip(scores, parts, strict=True)]
        peak = mx.maximum(*peaks)
        mass, mixed = mx.zeros_like(peak), mx.zeros((1,))
        if sinks is not None:
            sinks = mx.repeat(sinks.reshape(heads, group), width, axis=1)[..., None]
            peak = mx.maximum(peak, sinks.astype(mx.float32))
            mass = mx.exp(sinks - peak)
        for each, part in zip(scores, parts, strict=True):
            weights = mx.exp(each - (peak if part.owners is None else peak[part.owners]))
            values = part.arrays[0 if rotary is not None else 1]
            mass = mass + _sum(weights.sum(axis=-1, keepdims=True), part, slots)
            mixed = mixed + _sum(weights.astype(values.dtype) @ values, part, slots)
        out: mx.array = (mixed / mass).astype(queries.dtype)
        return out.reshape(slots, query_heads, width, -1)


def _of_prompts(
    queries: mx.array,
    pool: Pool,
    tails: Pair,
    window: Window,
    scale: float,
    sliding: int,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of a window of prompts, by MLX's own kernel."""
    width = window.tail
    filled = min(window.longest, pool.length if pool.ring else window.longest)
    keys, values = tails
    if filled:
        pages = window.table[:, : -(-filled // PAGE)]
        pairs = zip(pool.gather() if pool.ring else pool.bodies(pages), tails, strict=True)
        keys, values = (mx.concatenate([old[:, :, :filled], new], axis=2) for old, new in pairs)
    mask: mx.array | str = "causal"
    sees_all = not sliding or window.longest + width <= sliding
    blocks = window.blocks is not None and sliding
    if window.both_ways or blocks or not (window.even and sees_all):
        of_body, mask = window.masks(sliding, pool.ring)
        if filled:
            of_body = mx.broadcast_to(of_body[..., :filled], (*mask.shape[:3], filled))
            mask = mx.concatenate([of_body, mask], axis=-1)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


class _Part(NamedTuple):
    """Bodies or tails.

    Attributes:
        arrays: keys and values ``[N, H, L, D]``, of slots or of pages.
        mask: ``[N, 1, 1 or W, L]``.
        owners: ``[N]`` int32, the slot whose row has each page; None for slots.
    """

    arrays: Pair
    mask: mx.array
    owners: mx.array | None = None


def _scores(queries: Sequence[mx.array], part: _Part, group: int, softcap: float) -> mx.array:
    """Scores ``[N, H, R, L]`` float32 of queries ``[S, H, R, D]``; -inf where it is masked.

    Args:
        queries: of the keys, and for latent attention also of the values.
    """
    if part.owners is not None:
        queries = [each[part.owners] for each in queries]
    pairs = zip(queries, part.arrays, strict=False)
    scores = sum(asked @ keys.swapaxes(-1, -2) for asked, keys in pairs)
    assert isinstance(scores, mx.array)
    scores = scores.astype(mx.float32)
    if softcap:
        scores = mx.tanh(scores / softcap) * softcap
    mask = mx.tile(part.mask, (1, 1, group if part.mask.shape[2] > 1 else 1, 1))
    return mx.where(mask, scores, -mx.inf)


def _most(scores: mx.array, part: _Part, slots: int) -> mx.array:
    """The highest score of each query, ``[S, H, R, 1]``."""
    most = scores.max(axis=-1, keepdims=True)
    if part.owners is None:
        return most
    return mx.full((slots, *most.shape[1:]), -mx.inf).at[part.owners].maximum(most)


def _sum(sums: mx.array, part: _Part, slots: int) -> mx.array:
    """Sums ``[N, H, R, D]`` over the pages of each slot, ``[S, H, R, D]`` float32."""
    sums = sums.astype(mx.float32)
    if part.owners is None:
        return sums
    # A product, since a GPU would add to slots in any order. It adds 0 times the sums of others.
    own = (mx.arange(slots)[:, None] == part.owners).astype(mx.float32)
    return (own @ mx.nan_to_num(sums).flatten(1)).reshape(slots, *sums.shape[1:])
