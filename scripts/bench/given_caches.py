"""Rows for `BatchGenerator` whose prompts were read beforehand.

It merges the caches that its rows come with, all layers in one graph with its first step. Here
each layer is merged when that is asked for, so that many long rows are held twice for one layer
at a time and not for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache


class _Keys(KVCache):
    def __init__(self, of: KVCache) -> None:
        super().__init__()
        self.state = of.state

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Any:
        return _evaluated(KVCache.merge(caches))


class _Arrays(ArraysCache):
    def __init__(self, of: ArraysCache) -> None:
        super().__init__(len(of.cache))
        self.cache = list(of.cache)

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Any:
        return _evaluated(ArraysCache.merge(caches))


def given(caches: Sequence[Any]) -> list[Any]:
    """One row's caches in a form whose merging is not put off; the arrays stay theirs."""
    return [_Keys(cache) if isinstance(cache, KVCache) else _Arrays(cache) for cache in caches]


def _evaluated(merged: Any) -> Any:
    mx.eval(merged.state)
    return merged
