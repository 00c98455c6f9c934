"""Read prompts into mlx-lm's caches: with a tiny network, or with a stand-in that costs nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from omlx_worker.engine.models.any_family import _arrays_of
from omlx_worker.engine.models.families import as_ragged
from omlx_worker.engine.ragged.prefix import PrefixCache


class Reader(Protocol):
    def caches(self) -> list[Any]:
        """Fresh ones."""
        ...

    def read(self, tokens: Sequence[int], first: int, last: int, caches: list[Any]) -> None:
        """Read the tokens of a prompt from one position to another."""
        ...

    def arrays(self, caches: list[Any]) -> list[mx.array]:
        """What a row gets of its prompt."""
        ...


class Network:
    """A model, which reads as the decoder does. Its head's cache is left out of `arrays`."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._model = as_ragged(network)
        self._layers = len(make_prompt_cache(network))

    def caches(self) -> list[Any]:
        return self._model.new_prompt_cache()

    def read(self, tokens: Sequence[int], first: int, last: int, caches: list[Any]) -> None:
        following = [*tokens, 0][first + 1 : last + 1]
        chunk = mx.array([list(tokens[first:last])])
        self._model.prefill(chunk, mx.array([following]), caches)
        mx.eval([cache.state for cache in caches])

    def arrays(self, caches: list[Any]) -> list[mx.array]:
        parts = self._model.prompt_arrays(caches)[: self._layers]
        return [array for part in parts for array in part]

    def logits(self, token: int, caches: list[Any]) -> mx.array:
        """Read one token more; ``[1, 1, V]``."""
        logits: mx.array = self._network(mx.array([[token]]), cache=caches[: self._layers])
        return logits


class StandIn:
    """Layers whose arrays are digests of the tokens that they depend on.

    Args:
        kinds: of layers: ``all`` keep every position, ``sliding`` the last ones, ``recurrent`` only
            the present state.
    """

    WINDOW = 6

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds

    def caches(self) -> list[Any]:
        make = {"all": KVCache, "sliding": lambda: RotatingKVCache(self.WINDOW)}
        return [make.get(kind, lambda: ArraysCache(2))() for kind in self._kinds]

    def read(self, tokens: Sequence[int], first: int, last: int, caches: list[Any]) -> None:
        for layer, cache in enumerate(caches):
            digests = [digest(layer, tokens[: end + 1]) for end in range(first, last)]
            if isinstance(cache, ArraysCache):
                cache[0], cache[1] = mx.array([[digests[-1]]]), mx.array([[[-digests[-1]]]])
                continue
            keys = mx.array(digests)[None, None, :, None]
            cache.update_and_fetch(keys, mx.broadcast_to(-keys, (1, 1, last - first, 2)))
        mx.eval([cache.state for cache in caches])

    def arrays(self, caches: list[Any]) -> list[mx.array]:
        return [array for cache in caches for array in _arrays_of(cache)]


def digest(layer: int, tokens: Sequence[int]) -> float:
    hashed = hashlib.blake2b(bytes([layer, *tokens]), digest_size=3).digest()
    return float(int.from_bytes(hashed, "little"))


def read_all(
    reader: Reader, tokens: Sequence[int], chunk: int = 1 << 20, stops: Sequence[int] = ()
) -> list[Any]:
    """The caches of a prompt that is read cold, in chunks that end at ``stops`` too."""
    return read_on(reader, tokens, 0, reader.caches(), chunk, stops)


def read_on(
    reader: Reader,
    tokens: Sequence[int],
    done: int,
    caches: list[Any],
    chunk: int = 1 << 20,
    stops: Sequence[int] = (),
) -> list[Any]:
    while done < len(tokens):
        ends = [done + chunk, len(tokens), *(stop for stop in stops if stop > done)]
        reader.read(tokens, done, min(ends), caches)
        done = min(ends)
    return caches


def read_through(
    cache: PrefixCache, reader: Reader, tokens: Sequence[int], chunk: int = 1 << 20
) -> list[Any]:
    """Read a prompt as a decoder does: take, read, put where the tree branches, and at the end."""
    caches = reader.caches()
    done = cache.take(tokens, caches)
    branch = cache.shared(tokens)
    if branch > done:
        read_on(reader, tokens[:branch], done, caches, chunk)
        cache.put(tokens[:branch], caches)
        done = branch
    read_on(reader, tokens, done, caches, chunk)
    cache.put(tokens, caches)
    return caches
