"""Reads prompts: several rows in one forward, each into caches of its own.

Rows with equally many tokens in their caches are read together. Their caches are put side by side,
a chunk of each runs in one forward, padded on the right, and the caches are taken apart again.
Attention needs no mask for that: padding comes after everything that a row's own tokens see.
Recurrent layers hold their states from the end of a row's tokens on. If a model cannot do that,
rows of different lengths are read in forwards of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.prompt_cache import in_order, refill
from omlx_worker.engine.row import Row

MOST_POSITIONS = 1 << 16
"""Most positions of caches put side by side. Both the originals and the copy are in memory."""


@dataclass(slots=True)
class Reading:
    """A row whose history is being read. The first step reads the last token.

    Attributes:
        caches: mlx-lm's, of one row, with the first ``done`` tokens.
    """

    row: Row
    history: list[int]
    caches: list[Any]
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.history) - 1 - self.done


def read(model: RaggedModel, readings: Sequence[Reading], counts: Sequence[int]) -> None:
    """Read ``counts`` more tokens of rows with equally many in their caches.

    One forward reads all of them if the model holds its states over padding and the caches are not
    too long together. Waits for the device, so that the caller can time it.

    Raises:
        ValueError: if the caches hold different numbers of tokens.
    """
    if len({reading.done for reading in readings}) > 1:
        raise ValueError(
            "rows whose caches hold different numbers of tokens cannot be read together"
        )
    due = [pair for pair in zip(readings, counts, strict=True) if pair[1]]
    due.sort(key=lambda pair: pair[1])
    while due:
        together = [due.pop()]
        longest = together[0][0].done + together[0][1]
        while due and (len(together) + 1) * longest <= MOST_POSITIONS:
            if not model.pads and due[-1][1] < together[0][1]:
                break
            together.append(due.pop())
        _read(model, *zip(*together, strict=True))


def _read(model: RaggedModel, readings: Sequence[Reading], counts: Sequence[int]) -> None:
    """`read`, in one forward."""
    width = max(counts)
    stretches = [
        reading.history[reading.done : reading.done + count + 1]
        for reading, count in zip(readings, counts, strict=True)
    ]
    tokens = _padded([stretch[:-1] for stretch in stretches], width)
    following = _padded([stretch[1:] for stretch in stretches], width)
    caches = [reading.caches for reading in readings]
    if len(readings) == 1:
        model.prefill(tokens, following, caches[0])
    else:
        together = [_together(layer) for layer in zip(*caches, strict=True)]
        if min(counts) < width:
            for cache in together:
                if isinstance(cache, ArraysCache):
                    cache.lengths = mx.array(list(counts), mx.int32)
        model.prefill(tokens, following, together)
        for place, (reading, count) in enumerate(zip(readings, counts, strict=True)):
            reading.caches = [_apart(cache, place, width - count) for cache in together]
    mx.eval([cache.state for reading in readings for cache in reading.caches])
    for reading, count in zip(readings, counts, strict=True):
        reading.done += count


def _padded(rows: Sequence[list[int]], width: int) -> mx.array:
    """``[B, width]`` int32, zeros after each row's tokens."""
    return mx.array([[*row, *[0] * (width - len(row))] for row in rows], mx.int32)


def _together(caches: Sequence[Any]) -> Any:
    """One layer's caches of several rows as one cache of a batch."""
    first = caches[0]
    if first.empty():
        return first
    if isinstance(first, ArraysCache):
        merged = ArraysCache(len(first.cache))
        states = zip(*(cache.cache for cache in caches), strict=True)
        merged.cache = [mx.concatenate(list(parts)) for parts in states]
        return merged
    parts = [in_order(cache) for cache in caches]
    # Rings with equally many tokens read may differ in length, as their last chunks did.
    length = min(keys.shape[2] for keys, _ in parts)
    keys, values = (
        mx.concatenate([array[..., -length:, :] for array in arrays])
        for arrays in zip(*parts, strict=True)
    )
    return _cache_of(first, keys, values, first.offset)


def _apart(cache: Any, row: int, unread: int) -> Any:
    """The cache of one row, less ``unread`` positions of padding at its end."""
    if isinstance(cache, ArraysCache):
        alone = ArraysCache(len(cache.cache))
        alone.cache = [state[row : row + 1] for state in cache.cache]
        return alone
    keys, values = (array[row : row + 1] for array in in_order(cache))
    end = keys.shape[2] - unread
    return _cache_of(cache, keys[:, :, :end], values[:, :, :end], cache.offset - unread)


def _cache_of(like: Any, keys: mx.array, values: mx.array, offset: int) -> Any:
    """A cache of the same kind; see `refill`."""
    sliding = isinstance(like, RotatingKVCache)
    made = RotatingKVCache(like.max_size, like.keep) if sliding else KVCache()
    refill(made, keys, values, offset)
    return made
