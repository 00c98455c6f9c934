"""Sides of a benchmark whose prompts are read once, before the laps.

mlx-lm reads a prompt of 8,192 tokens for minutes on a GPU without Metal, so a lap cannot read its
prompts itself. Each side starts every lap from copies of the same caches instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from omlx_worker.bench.sides import FOREVER, BatchGeneratorSide, StreamSide
from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.layout import Seat, indices
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.batch import Batch, Held
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.reading import read
from omlx_worker.engine.rows.interface import LONGEST_CHUNK
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Report, Row

Layers = list[list[mx.array]]
"""What each layer holds of a prompt: keys and values ``[1, H, L, D]``, or states ``[1, ...]``."""


class PromptCaches:
    """What layers hold of all tokens of a prompt but the last: the network's, then the head's."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._model = as_ragged(network)
        self._prompts: dict[tuple[int, ...], Layers] = {}

    def read(self, prompts: Sequence[list[int]]) -> None:
        """Forget other prompts and read these."""
        self._prompts.clear()
        batch = Batch(self._model)
        for prompt in prompts:
            row, held = Row(RowRequest("", prompt, 1, Sampling())), Held()
            while length := min(LONGEST_CHUNK, row.left):
                batch.reserve([(row, row.computed + length)])
                read(self._model, batch.caches, [(row, held)], [length])
            seat = Seat(0, indices(row.pages))
            layers = self._prompts[tuple(prompt)] = [
                cache.held(seat, row.computed) if cache.paged else states
                for cache, states in zip(batch.caches, held.layers, strict=True)
            ]
            mx.eval(layers)
            batch.release(row)

    def layers_of(self, prompt: Sequence[int], *, head: bool = False) -> Layers:
        """Those of one prompt, the head's left out unless asked for."""
        layers = self._prompts[tuple(prompt)]
        return layers if head else layers[: len(self._network.layers)]

    def of(self, prompt: Sequence[int]) -> list[Any]:
        """mlx-lm's caches of one prompt."""
        caches: list[Any] = make_prompt_cache(self._network)
        for cache, arrays in zip(caches, self.layers_of(prompt), strict=True):
            if isinstance(cache, KVCache):
                cache.state = (*arrays, len(prompt) - 1)
            else:
                cache.cache = list(arrays)
        return caches

    def bytes_after(self, prompt: Sequence[int], decoded: float, *, head: bool) -> float:
        """What the layers hold of a prompt when ``decoded`` more tokens are in them."""
        read, total = len(prompt) - 1, 0.0
        for cache, arrays in zip(
            self._model.new_caches(1, 1), self.layers_of(prompt, head=head), strict=False
        ):
            held = sum(array.nbytes for array in arrays)
            grows = isinstance(cache, AttentionCache)
            total += held * (read + decoded) / read if grows else held
        return total


class GivenStream(StreamSide):
    def __init__(self, network: nn.Module, caches: PromptCaches) -> None:
        super().__init__(network)
        self._caches = caches

    def _generate(self, prompt: list[int], sampler: Callable[[mx.array], mx.array]) -> Any:
        return generate_step(
            mx.array(prompt[-1:]),
            self._network,
            max_tokens=FOREVER,
            sampler=sampler,
            prompt_cache=copy.deepcopy(self._caches.of(prompt)),
        )


class GivenBatchGenerator(BatchGeneratorSide):
    def __init__(self, network: nn.Module, caches: PromptCaches) -> None:
        super().__init__(network)
        self._caches = caches

    def _insert(self, generator: BatchGenerator, prompts: Sequence[list[int]]) -> None:
        generator.insert(
            [prompt[-1:] for prompt in prompts],
            caches=[_merged_at_once(self._caches.of(prompt)) for prompt in prompts],
        )


class GivenDecoder(RaggedDecoder):
    """A decoder whose rows join as soon as they are added."""

    def __init__(
        self, model: RaggedModel, caches: PromptCaches, depth: int, lookup: int = 0
    ) -> None:
        super().__init__(model, depth, lookup)
        self._given = caches

    def add(self, row: Row) -> int:
        held = self.rows[row] = Held()
        row.computed = row.left
        self.reserve([(row, row.computed)])
        layers = self._given.layers_of(row.request.prompt, head=self._model.drafter is not None)
        seat = Seat(0, indices(row.pages))
        for cache, part in zip(self.caches, layers, strict=True):
            if cache.paged:
                cache.write(seat, part)
                mx.eval(cache.arrays)
        held.layers = [
            [] if cache.paged else part for cache, part in zip(self.caches, layers, strict=True)
        ]
        self.join([row])
        return 0

    def read(self, tokens: Mapping[Row, int]) -> dict[Row, Report]:  # noqa: ARG002
        return {}


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


def _merged_at_once(caches: Sequence[Any]) -> list[Any]:
    """Caches that `BatchGenerator` merges a layer at a time.

    It merges all layers in one graph with its first step, which holds all rows twice.
    """
    return [_Keys(cache) if isinstance(cache, KVCache) else _Arrays(cache) for cache in caches]


def _evaluated(merged: Any) -> Any:
    mx.eval(merged.state)
    return merged
