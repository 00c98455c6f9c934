"""What an MTP head has yet to read while steps run without drafts.

Such steps leave the head out, which is what makes them as cheap as plain decoding. The hidden
states and tokens that it would have read are kept: those of tails in the state, those of bodies
with the rows, so that it can catch up and draft as if it had never been left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.attention_cache import TAIL, AttentionCache, Spans, Window, spans_of
from omlx_worker.engine.ragged.programs import Programs
from omlx_worker.engine.ragged.seats import Seats, Slot
from omlx_worker.engine.ragged.step import Arrays, State
from omlx_worker.engine.ragged.unread import MOST_UNREAD, Unread

Read = Callable[[State, Arrays, mx.array], Arrays]

PIECES = (8, 32)
"""Tail positions of each row read in one call: as few as a few steps miss, and more, but no more
than keeps scores over long bodies small."""


class Backlog:
    """Of every row, what of its body is unread and what of its tail.

    A row whose body is unread in part has a tail that is unread from its start.
    """

    def __init__(self, model: RaggedModel, seats: Seats) -> None:
        self._model = model
        self._seats = seats
        self._buffers = seats.buffers
        self._reads: Programs[tuple[int, Spans], Read] = Programs()

    def leave_out(self, width: int) -> None:
        """A step is about to leave the head out.

        Args:
            width: of the window in flight, whose outcome the head has not read either.
        """
        for _, slot in self._seats.taken:
            if slot.missed_from is None:
                slot.missed_from = max(0, slot.offset - width)

    def catch_up(self) -> None:
        """Let the head read all that it has missed, so that it can draft again."""
        late = [(index, slot) for index, slot in self._seats.taken if slot.unread]
        if late:
            self._buffers.settle()
        for index, slot in late:
            assert slot.unread is not None
            slot.unread.read(self._model, self._head_layers, index)
            slot.unread = None
        if any(slot.missed_from is not None for _, slot in self._seats.taken):
            self._buffers.take_up_latest()
            self._read_tails()

    def before_fold(self) -> None:
        """Tails are about to move to their bodies, and what is unread of them with them."""
        behind = [taken for taken in self._seats.taken if taken[1].missed_from is not None]
        if not behind:
            return
        cursors = self._cursors()
        ends = [cursors[index] - slot.body_length for index, slot in behind]
        if any(
            end - (slot.missed_from or 0) + len(slot.unread or ()) > MOST_UNREAD
            for (_, slot), end in zip(behind, ends, strict=True)
        ):
            self.catch_up()
        else:
            for (index, slot), end in zip(behind, ends, strict=True):
                self._put_off(index, slot, end)
        for _, slot in behind:
            slot.missed_from = 0

    def before_leaving(self, index: int, slot: Slot) -> None:
        """A row is about to be taken out of its slot, its tail as part of its body."""
        if slot.missed_from is not None:
            self._put_off(index, slot, self._cursors()[index] - slot.body_length)
            slot.missed_from = None

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
        assert slot.missed_from is not None
        if slot.missed_from >= end:
            return
        if slot.unread is None:
            slot.unread = Unread(slot.body_length + slot.missed_from)
        # A gather, since a slice would hold on to the whole batch's array.
        places = mx.arange(slot.missed_from, end)
        hidden, following = (
            mx.take(self._buffers.state[name][index], places, axis=0)[None]
            for name in ("hidden", "following")
        )
        slot.unread.add(hidden, following)
        mx.eval(slot.unread.arrays)

    def _read_tails(self) -> None:
        """Read as many positions of every row as were missed of the one that missed the most."""
        begins, missed = [0] * len(self._seats.slots), 0
        for index, slot in self._seats.taken:
            begins[index] = slot.offset if slot.missed_from is None else slot.missed_from
            missed = max(missed, slot.offset - begins[index])
            slot.missed_from = None
        few, many = PIECES
        while missed > 0:
            width = few if missed <= 2 * few else many
            self._read_piece(width, begins)
            begins = [begin + width for begin in begins]
            missed -= width

    def _read_piece(self, width: int, begins: list[int]) -> None:
        caches, state = self._buffers.caches, self._buffers.state
        build = partial(_compiled, self._model, width)
        read = self._reads.get((width, spans_of(caches)), build)
        # Nothing else of the state, whose shapes are traced as well.
        known = {name: state[name] for name in ("body_lengths", "following", "hidden")}
        places = mx.array([min(begin, TAIL - width) for begin in begins], mx.int32)
        written = read(known, [cache.arrays for cache in caches], places)
        for cache, part in zip(caches, written, strict=True):
            cache.advance(part)


def _compiled(model: RaggedModel, width: int, on_trace: Callable[[], None]) -> Read:
    """From state, layers and where a piece begins, ``[S]`` int32, to what the layers wrote.

    Positions past a row's cursor come out wrong; the row's next windows overwrite them.
    """

    def read(state: State, layers: Arrays, begins: mx.array) -> Arrays:
        on_trace()
        caches = model.wrap(layers)
        body_lengths = state["body_lengths"]
        window = Window.at(body_lengths + begins, body_lengths, width, spans_of(caches))
        places = begins[:, None] + mx.arange(width)
        tokens = mx.take_along_axis(state["following"], places, axis=1)
        hidden = mx.take_along_axis(state["hidden"], places[..., None], axis=1)
        model.draft(tokens, hidden, caches, window)
        return [cache.written for cache in caches]

    compiled: Read = mx.compile(read)
    return compiled
