"""What an MTP head has yet to read while steps run without drafts.

Such steps leave the head out, which is what makes them as cheap as plain decoding. The hidden
states and tokens that it would have read are kept: those of tails in the state, those of bodies
with the rows, so that it can catch up and draft as if it had never been left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from omlx_worker.engine.attention_cache import TAIL, AttentionCache, Spans, Window, spans_of
from omlx_worker.engine.models import RaggedModel
from omlx_worker.engine.programs import Programs
from omlx_worker.engine.seats import Seats, Slot
from omlx_worker.engine.step import Arrays, State
from omlx_worker.engine.unread import MOST_UNREAD, Unread

Read = Callable[[State, Arrays, mx.array], Arrays]

PIECE = 32
"""Tail positions read in one call, so that scores over long bodies stay small; divides `TAIL`."""


class Backlog:
    """Of every row, what of its body is unread, and the same range of all tails.

    A row whose body is unread in part has a tail that is unread from its start.

    Attributes:
        begin: the first tail position that may have been missed; None while drafting.
    """

    def __init__(self, model: RaggedModel, seats: Seats) -> None:
        self.begin: int | None = None
        self._model = model
        self._seats = seats
        self._buffers = seats.buffers
        self._reads: Programs[Spans, Read] = Programs()

    def leave_out(self, width: int) -> None:
        """A step is about to leave the head out.

        Args:
            width: of the window in flight, whose outcome the head has not read either.
        """
        if self.begin is None:
            offset = min(slot.offset for _, slot in self._seats.taken)
            self.begin = max(0, offset - width)

    def restart(self) -> None:
        """Some tail is new: what is missed from here on begins at its start."""
        if self.begin is not None:
            self.begin = 0

    def clear(self) -> None:
        """No row is left that the head could draft for."""
        self.begin = None

    def catch_up(self) -> None:
        """Let the head read all that it has missed, so that it can draft again."""
        late = [(index, slot) for index, slot in self._seats.taken if slot.unread]
        if late:
            self._buffers.settle()
        for index, slot in late:
            assert slot.unread is not None
            slot.unread.read(self._model, self._head_layers, index)
            slot.unread = None
        if self.begin is not None:
            self._buffers.take_up_latest()
            self._read_tails(self.begin)
            self.begin = None

    def before_fold(self) -> None:
        """Tails are about to move to their bodies, and what is unread of them with them."""
        if self.begin is None:
            return
        cursors = self._cursors()
        ends = [cursors[index] - slot.body_length for index, slot in self._seats.taken]
        known = [len(slot.unread) if slot.unread else 0 for _, slot in self._seats.taken]
        if max(map(sum, zip(ends, known, strict=True))) > MOST_UNREAD + self.begin:
            self.catch_up()
        else:
            for (index, slot), end in zip(self._seats.taken, ends, strict=True):
                self._put_off(index, slot, end)
        self.begin = 0

    def before_leaving(self, index: int, slot: Slot) -> None:
        """A row is about to be taken out of its slot, its tail as part of its body."""
        if self.begin is not None:
            self._put_off(index, slot, self._cursors()[index] - slot.body_length)

    @property
    def _head_layers(self) -> list[AttentionCache]:
        layers = self._buffers.caches[-self._model.head_layers :]
        return [layer for layer in layers if isinstance(layer, AttentionCache)]

    def _cursors(self) -> list[int]:
        self._buffers.settle()
        cursors: list[int] = self._buffers.state["cursors"].tolist()  # type: ignore[assignment]
        return cursors

    def _put_off(self, index: int, slot: Slot, end: int) -> None:
        """Keep with the row what is unread of its tail up to ``end``."""
        assert self.begin is not None
        if self.begin >= end:
            return
        if slot.unread is None:
            slot.unread = Unread(slot.body_length + self.begin)
        # A gather, since a slice would hold on to the whole batch's array.
        places = mx.arange(self.begin, end)
        hidden, following = (
            mx.take(self._buffers.state[name][index], places, axis=0)[None]
            for name in ("hidden", "following")
        )
        slot.unread.add(hidden, following)
        mx.eval(slot.unread.arrays)

    def _read_tails(self, begin: int) -> None:
        caches, state = self._buffers.caches, self._buffers.state
        end = max(slot.offset for _, slot in self._seats.taken)
        read = self._reads.get(spans_of(caches), partial(_compiled, self._model))
        # Nothing else of the state, whose shapes are traced as well.
        known = {name: state[name] for name in ("body_lengths", "following", "hidden")}
        for piece in range(begin // PIECE * PIECE, min(end, TAIL), PIECE):
            arrays = [cache.arrays for cache in caches]
            written = read(known, arrays, mx.array(piece, mx.int32))
            for cache, part in zip(caches, written, strict=True):
                cache.advance(part)


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
