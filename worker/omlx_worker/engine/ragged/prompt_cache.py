"""What mlx-lm's attention caches hold of one prompt or of several, in the order of positions.

`RotatingKVCache` writes around its ring and has no public way to read it in order, so only this
module uses its private fields.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache


def in_order(cache: KVCache | RotatingKVCache) -> list[mx.array]:
    """Keys and values, ``[B, H, T, D]``, the oldest position first.

    A ring that was just written in a chunk has more positions than its window.
    """
    if isinstance(cache, RotatingKVCache):
        return [cache._temporal_order(array) for array in (cache.keys, cache.values)]
    return list(cache.keys_and_values())


def in_window(cache: RotatingKVCache) -> list[mx.array]:
    """Keys and values of the sliding window alone, the oldest position first."""
    latest = min(cache.offset, cache.max_size)
    return [array[..., -latest:, :] for array in in_order(cache)]


def refill(cache: KVCache | RotatingKVCache, keys: mx.array, values: mx.array, offset: int) -> None:
    """Replace what a cache holds. The last key and value are those of position ``offset - 1``."""
    cache.keys, cache.values, cache.offset = keys, values, offset
    if isinstance(cache, RotatingKVCache):
        cache._idx = keys.shape[2]
