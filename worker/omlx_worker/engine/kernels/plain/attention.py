"""Attention of a window to body and tail by MLX's operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from omlx_worker.engine.kernels.attention import Heads, Pair
from omlx_worker.engine.kernels.window import PAGE, Window


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
        bodies: Pair,
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
        # Query heads that share a key head become rows of one product: [S, H, R, D].
        asked = [
            (part * scale).reshape(slots, heads, group * width, part.shape[-1])
            for part in (queries, rotary)
            if part is not None
        ]
        body_mask, tail_mask = window.masks(sliding, ring)
        if sliding:
            body_mask = mx.tile(body_mask, (1, 1, group, 1))
        if sinks is not None:
            sinks = mx.repeat(sinks.reshape(heads, group), width, axis=1)[..., None]
        parts = [
            _Part(bodies, body_mask, None if ring else window.table),
            _Part(tails, mx.tile(tail_mask, (1, 1, group, 1))),
        ]
        return _mixed(asked, parts, sinks, softcap).reshape(slots, query_heads, width, -1)


def body_of(pool: mx.array, table: mx.array) -> mx.array:
    """The bodies ``[S, H, M * PAGE, D]`` that pages ``[P, H, PAGE, D]`` make."""
    return pool.flatten(0, 1)[_index(pool, table)].flatten(2, 3)


def _of_prompts(
    queries: mx.array,
    bodies: Pair,
    tails: Pair,
    window: Window,
    scale: float,
    ring: int,
    sliding: int,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of a window of prompts, by MLX's own kernel."""
    width = window.tail
    filled = min(window.longest, bodies[0].shape[2] if ring else window.longest)
    if not ring:
        pages = window.table[:, : -(-filled // PAGE)]
        bodies = body_of(bodies[0], pages), body_of(bodies[1], pages)
    pairs = zip(bodies, tails, strict=True)
    keys, values = (
        mx.concatenate([old[:, :, :filled], new], axis=2) if filled else new for old, new in pairs
    )
    mask: mx.array | str = "causal"
    if not (window.even and (not sliding or window.longest + width <= sliding)):
        of_body, mask = window.masks(sliding, ring)
        if filled:
            of_body = mx.broadcast_to(of_body[..., :filled], (*mask.shape[:3], filled))
            mask = mx.concatenate([of_body, mask], axis=-1)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


class _Part(NamedTuple):
    """Bodies or tails.

    Attributes:
        mask: ``[S, 1, 1 or R, L]``.
        table: ``[S, M]``, of bodies that are pages.
    """

    arrays: Pair
    mask: mx.array
    table: mx.array | None = None


def _mixed(
    queries: Sequence[mx.array], parts: Sequence[_Part], sinks: mx.array | None, softcap: float
) -> mx.array:
    """Attention of queries ``[S, H, R, D]`` to bodies and tails.

    Args:
        queries: of the keys, and for latent attention also of the values.
        sinks: ``[H, R, 1]``.
    """
    scores = [_scores(queries, part, softcap) for part in parts]
    ends = [scores[0].shape[-1], scores[0].shape[-1] + scores[1].shape[-1]]
    if sinks is not None:
        column = mx.broadcast_to(sinks, (*scores[0].shape[:-1], 1))
        scores.append(column.astype(scores[0].dtype))
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1, precise=True)
    values = 0 if len(queries) == 2 else 1
    body, tail = (
        _sum(of_part, part.arrays[values], part.table)
        for of_part, part in zip(mx.split(weights, ends, axis=-1), parts, strict=False)
    )
    return body + tail


def _scores(queries: Sequence[mx.array], part: _Part, softcap: float) -> mx.array:
    """Scores of a body or tail, masked, ``[S, H, R, L]``."""
    pairs = zip(queries, part.arrays, strict=False)
    scores = sum(_products(asked, keys, part.table) for asked, keys in pairs)
    assert isinstance(scores, mx.array)
    if softcap:
        scores = mx.tanh(scores / softcap) * softcap
    return mx.where(part.mask, scores, mx.finfo(scores.dtype).min)


def _products(queries: mx.array, keys: mx.array, table: mx.array | None) -> mx.array:
    """Products of queries ``[S, H, R, D]`` with the keys of every position: ``[S, H, R, L]``."""
    keys = keys.swapaxes(-1, -2)
    if table is None:
        return queries @ keys
    return _by_page(queries[:, :, None], keys, table).swapaxes(2, 3).flatten(3, 4)


def _sum(weights: mx.array, values: mx.array, table: mx.array | None) -> mx.array:
    """Sums over positions, with weights ``[S, H, R, L]``: ``[S, H, R, D]``."""
    if table is None:
        return weights @ values
    of_pages = mx.unflatten(weights, 3, (-1, PAGE)).swapaxes(2, 3)
    sums = _by_page(of_pages, values, table)
    return sums.astype(mx.float32).sum(axis=2).astype(weights.dtype)


def _by_page(factors: mx.array, pool: mx.array, table: mx.array) -> mx.array:
    """Products of ``[S, H, 1 or M, R, K]`` with a row's pages, of ``[P, H, K, N]``.

    Returns:
        ``[S, H, M, R, N]``.
    """
    index = _index(pool, table)
    if mx.default_device() == mx.gpu or pool.dtype != mx.float32:
        return factors @ pool.flatten(0, 1)[index]
    # Copies no page. MLX has it for this type alone on a CPU.
    own = mx.arange(math.prod(factors.shape[:3]), dtype=mx.uint32).reshape(factors.shape[:3])
    own = mx.broadcast_to(own, index.shape)
    return mx.gather_mm(factors, pool, own, index)


def _index(pool: mx.array, table: mx.array) -> mx.array:
    """Which of the pages and heads ``[P * H]`` each row has: ``[S, H, M]``."""
    heads = pool.shape[1]
    index: mx.array = table[:, None] * heads + mx.arange(heads)[:, None]
    return index.astype(mx.uint32)
