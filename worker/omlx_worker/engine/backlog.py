"""What an MTP head has yet to read while steps run without drafts.

Such steps leave the head out, which is what makes them as cheap as plain decoding. The hidden
states and tokens that it would have read are kept in the state for as long as their positions
lie in the tails, so that it can catch up and draft as if it had never been left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from omlx_worker.engine.attention_cache import TAIL, Spans, Window, spans_of
from omlx_worker.engine.layer_cache import LayerCache
from omlx_worker.engine.models import RaggedModel
from omlx_worker.engine.programs import Programs
from omlx_worker.engine.step import Arrays, State

Read = Callable[[State, Arrays, mx.array], Arrays]

PIECE = 32
"""Tail positions read in one call, so that scores over long bodies stay small; divides `TAIL`."""


class Backlog:
    """Tail positions that the head has missed, the same range for every row.

    Attributes:
        begin: the first tail position that may have been missed; None while drafting.
    """

    def __init__(self, model: RaggedModel) -> None:
        self.begin: int | None = None
        self._model = model
        self._reads: Programs[Spans, Read] = Programs()

    def open(self, position: int) -> None:
        """From this tail position on, the head is left out."""
        if self.begin is None:
            self.begin = max(0, position)

    def restart(self) -> None:
        """Some tail is new: what is missed from here on begins at its start."""
        if self.begin is not None:
            self.begin = 0

    def clear(self) -> None:
        """No row is left that the head could draft for."""
        self.begin = None

    def read(self, state: State, caches: Sequence[LayerCache], end: int) -> None:
        """Let the head read all tails from `begin` to ``end``, so that it can draft again."""
        if self.begin is None:
            return
        read = self._reads.get(spans_of(caches), partial(_compiled, self._model))
        # Nothing else of the state, whose shapes are traced as well.
        known = {name: state[name] for name in ("body_lengths", "following", "hidden")}
        for begin in range(self.begin // PIECE * PIECE, min(end, TAIL), PIECE):
            arrays = [cache.arrays for cache in caches]
            written = read(known, arrays, mx.array(begin, mx.int32))
            for cache, part in zip(caches, written, strict=True):
                cache.advance(part)
        self.begin = None


def _compiled(model: RaggedModel, on_trace: Callable[[], None]) -> Read:
    """From state, layers and the start ``[]`` int32 of a piece to what the layers wrote.

    Positions past a row's cursor come out wrong; the row's next windows overwrite them.
    """

    def read(state: State, layers: Arrays, begin: mx.array) -> Arrays:
        on_trace()
        caches = model.wrap(layers)
        body_lengths = state["body_lengths"]
        window = Window.at(body_lengths + begin, body_lengths, PIECE, spans_of(caches))
        places = begin + mx.arange(PIECE)
        tokens = mx.take(state["following"], places, axis=1)
        model.draft(tokens, mx.take(state["hidden"], places, axis=1), caches, window)
        return [cache.written for cache in caches]

    compiled: Read = mx.compile(read)
    return compiled
