"""Read prompts: with a tiny network, or with a stand-in that costs nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.engine.caches.layout import Pages, Seat, capacity_for, indices, pages_for
from omlx_worker.engine.kernels.window import Window, own_pages
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.models.ragged_model import LayerCache, RaggedModel
from omlx_worker.engine.ragged import batch
from omlx_worker.engine.ragged.prefix_arrays import ArraySpec, LayerSpecs
from omlx_worker.engine.ragged.reading import Reading, read
from omlx_worker.engine.rows.row import Row
from tests.helpers.decoding import row

Held = Sequence[list[mx.array]]
"""What each layer holds of a row: keys and values ``[1, H, L, D]``, or states ``[1, ...]``."""


class Reader(Protocol):
    specs: LayerSpecs

    def read(self, tokens: Sequence[int], first: int, last: int, layers: Held) -> Held:
        """Read the tokens of a prompt from one position to another.

        Args:
            layers: what is known of the tokens before the first; nothing at 0.
        """
        ...

    def arrays(self, layers: Held) -> list[mx.array]:
        """What a row gets of its prompt."""
        ...


class Network:
    """A model, which reads as the decoder does. What its head holds is left out of `arrays`."""

    def __init__(self, network: nn.Module) -> None:
        self.model = as_ragged(network)
        self.specs = LayerSpecs.of(self.model)
        backbone = as_ragged(network, drafts=False, checks=False)
        self._layers = len(backbone.new_caches(1, 1))

    def read(self, tokens: Sequence[int], first: int, last: int, layers: Held) -> Held:
        return read_apart(self.model, [*tokens, 0], last, first, layers)

    def arrays(self, layers: Held) -> list[mx.array]:
        return [array for part in layers[: self._layers] for array in part]

    def logits(self, token: int, done: int, layers: Held) -> mx.array:
        """What follows one token more; ``[1, 1, V]``."""
        caches = self.model.new_caches(1, capacity_for(done))
        for cache, part in zip(caches, layers, strict=True):
            cache.write(Seat(0, tuple(range(pages_for(done)))), part)
        at = mx.array([done], mx.int32)
        window = Window.at(at, at, 1, own_pages(1, pages_for(capacity_for(done))))
        tokens, none = mx.array([[token]], mx.int32), mx.zeros_like(at)
        return self.model.logits(self.model.forward(tokens, caches, window, none))


def read_apart(
    model: RaggedModel, history: list[int], last: int, first: int = 0, layers: Held = ()
) -> Held:
    """What the layers hold of a row that is read alone, up to a position.

    Args:
        first, layers: the tokens that are read already, and what the layers hold of them.
    """
    caches, count = model.new_caches(1, last), pages_for(last)
    alone, begun = Row(row("", history, 1)), batch.Held()
    alone.pages, alone.computed = Pages(count).take(count), first
    for cache, part in zip(caches, layers, strict=False):
        if cache.paged:
            cache.write(Seat(0, indices(alone.pages)), part)
        begun.layers.append([] if cache.paged else list(part))
    read(model, caches, [(alone, begun)], [last - first])
    return held((alone, begun), caches)


def held(reading: Reading, caches: Sequence[LayerCache]) -> Held:
    """What the layers hold of a row."""
    row, rest = reading
    seat = Seat(0, indices(row.pages))
    return [
        cache.held(seat, row.computed) if cache.paged else layer
        for cache, layer in zip(caches, rest.layers, strict=False)
    ]


class StandIn:
    """Layers whose arrays are digests of the tokens that they depend on.

    Args:
        kinds: of layers: ``all`` keep every position, ``sliding`` the last ones, ``recurrent`` only
            the present state.
    """

    WINDOW = 6

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds
        windows = {"all": None, "sliding": self.WINDOW, "recurrent": 0}
        self.specs = LayerSpecs(
            [
                [ArraySpec(array.shape, array.dtype, windows[kind]) for array in arrays]
                for kind, arrays in zip(kinds, self.read([0], 0, 1, []), strict=True)
            ]
        )

    def read(self, tokens: Sequence[int], first: int, last: int, layers: Held) -> Held:
        known = layers or [[] for _ in self._kinds]
        made = [
            self._read(layer, tokens, first, last, arrays) for layer, arrays in enumerate(known)
        ]
        mx.eval(made)
        return made

    def _read(
        self, layer: int, tokens: Sequence[int], first: int, last: int, arrays: list[mx.array]
    ) -> list[mx.array]:
        digests = [digest(layer, tokens[: end + 1]) for end in range(first, last)]
        if self._kinds[layer] == "recurrent":
            return [mx.array([[digests[-1]]]), mx.array([[[-digests[-1]]]])]
        before: list[float] = arrays[0].reshape(-1).tolist() if arrays else []  # type: ignore[assignment]
        if self._kinds[layer] == "all":
            held = [*before, *digests]
        else:
            held = [*before, *[0.0] * (min(last, self.WINDOW) - len(before))]
            for position, value in zip(range(first, last), digests, strict=True):
                held[position % self.WINDOW] = value
        keys = mx.array(held)[None, None, :, None]
        return [keys, mx.broadcast_to(-keys, (1, 1, len(held), 2))]

    def arrays(self, layers: Held) -> list[mx.array]:
        return [array for part in layers for array in part]


def digest(layer: int, tokens: Sequence[int]) -> float:
    hashed = hashlib.blake2b(bytes([layer, *tokens]), digest_size=3).digest()
    return float(int.from_bytes(hashed, "little"))


def read_all(
    reader: Reader, tokens: Sequence[int], chunk: int = 1 << 20, stops: Sequence[int] = ()
) -> Held:
    """What the layers hold of a prompt that is read cold, in chunks that end at ``stops`` too."""
    return read_on(reader, tokens, 0, [], chunk, stops)


def read_on(
    reader: Reader,
    tokens: Sequence[int],
    done: int,
    layers: Held,
    chunk: int = 1 << 20,
    stops: Sequence[int] = (),
) -> Held:
    while done < len(tokens):
        ends = [done + chunk, len(tokens), *(stop for stop in stops if stop > done)]
        layers = reader.read(tokens, done, min(ends), layers)
        done = min(ends)
    return layers
