"""Reads prompts: windows that commit all of their tokens, of several rows in one forward.

A row that is read is pages, the states of layers that have none, and a cursor. Its keys and values
are written where its steps will read them. Rows with different numbers of tokens behind them are
read together, unless their lengths are too far apart (`SPREAD`). Windows are padded on the right:
causal attention needs no mask for that, since padding comes after everything that a row's own
tokens see, and recurrent layers hold their states from the end of a row's tokens on. Where they
cannot, all rows read as many tokens as the shortest, again and again.

What a window gives is what scores the tokens after each of its own. Windows in which tokens are
scored are so narrow that `MOST_LOGITS` bounds their logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from omlx_worker.engine.caches.layout import Page, Seat, capacity_for, indices, pages_for
from omlx_worker.engine.kernels.window import Window, table_of
from omlx_worker.engine.models.embedder import Embedder
from omlx_worker.engine.models.ragged_model import LayerCache, Layers, RaggedModel
from omlx_worker.engine.ragged.sampling import score
from omlx_worker.engine.rows.row import Report, Row, Scored

Prefill = Callable[[mx.array, Sequence[LayerCache], Window], mx.array]
"""See `RaggedModel.prefill`."""

MOST_POSITIONS = 1 << 16
"""Most positions of rows that are read together."""

SPREAD = 1.5
"""How much more room than they need themselves rows have that are read together, at most."""

MOST_LOGITS = 1 << 26
"""Logits of a window in which prompts are scored, at most, but for one token of each row."""

SCORED_AT_ONCE = 1 << 24
"""Logits that are scored at a time, at most, but for one token of each row."""

LEAST_ROOM = 512
"""Positions that a row counts for, at least, so that all short rows may be read together."""


def room_for(positions: int) -> int:
    """The positions of a row that is read up to there."""
    return max(LEAST_ROOM, capacity_for(positions))


@dataclass(slots=True)
class Reading:
    """A row whose history is being read. The first step reads the last token.

    Attributes:
        done: the tokens that are read.
        pages: of its own, with room for these and for the next tokens.
        states: what layers hold of it besides pages, a list for each; none before its first token.
        scored: the tokens of its prompt from the second on, or its targets, as far as it is read,
            if they are to be scored.
        pooled: ``[hidden]`` float32, what `Embedder.pool` gave for the tokens that are read.
    """

    request: Row
    history: list[int]
    done: int = 0
    pages: list[Page] = field(default_factory=list)
    states: Layers = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    pooled: mx.array | None = None

    @property
    def row_id(self) -> str:
        return self.request.row_id

    @property
    def left(self) -> int:
        return len(self.history) - 1 - self.done

    @property
    def is_scored(self) -> bool:
        return self.request.prompt_logprobs is not None

    def targets(self, start: int, end: int) -> list[tuple[int, int]]:
        """The tokens that a window from ``start`` to ``end`` scores, each after its position."""
        row = self.request
        if row.targets or not self.is_scored:
            return [
                (each.place - 1, each.token) for each in row.targets if start < each.place <= end
            ]
        last = min(end, len(row.prompt) - 1)
        return [(position, row.prompt[position + 1]) for position in range(start, last)]


def read(
    model: RaggedModel,
    caches: Sequence[LayerCache],
    readings: Sequence[Reading],
    lengths: Sequence[int],
    prefill: Prefill | None = None,
) -> None:
    """Read the next ``lengths`` tokens of each row. Waits for the device, so it can be timed.

    Args:
        caches: whose pages the rows have. Nothing in flight may read them: MLX would copy them.
        prefill: in place of the model's own.
    """
    due = {id(reading): count for reading, count in zip(readings, lengths, strict=True)}
    while rows := [reading for reading in readings if due[id(reading)]]:
        together = _together(rows, due)
        widths = [due[id(reading)] for reading in together]
        most = max(1, MOST_LOGITS // (model.vocabulary * len(together)))
        if max(widths) > most and _any_scored(together, widths):
            # What comes before scored tokens is read first, in windows of any width.
            unscored = [row for row in together if row.done < row.request.shareable]
            together = unscored or together
            lengths = [row.request.shareable - row.done if unscored else most for row in together]
            widths = [min(due[id(row)], each) for row, each in zip(together, lengths, strict=True)]
        if not model.pads:
            widths = [min(widths)] * len(widths)
        _read(model, caches, together, widths, prefill or model.prefill)
        for reading, width in zip(together, widths, strict=True):
            due[id(reading)] -= width


def _any_scored(readings: Sequence[Reading], lengths: Sequence[int]) -> bool:
    """Whether the next tokens of these rows score any."""
    return any(
        reading.targets(reading.done, reading.done + length)
        for reading, length in zip(readings, lengths, strict=True)
    )


def _together(rows: Sequence[Reading], due: dict[int, int]) -> list[Reading]:
    """The longest of these rows, and those that may be read with it.

    All of them get its capacity.
    """
    needs = {id(row): room_for(row.done + due[id(row)]) for row in rows}
    first, *others = sorted(rows, key=lambda row: -needs[id(row)])
    together, capacity = [first], needs[id(first)]
    own = capacity
    for row in others:
        own += needs[id(row)]
        positions = (len(together) + 1) * capacity
        if positions > min(MOST_POSITIONS, SPREAD * own):
            break
        together.append(row)
    return together


def _read(
    model: RaggedModel,
    caches: Sequence[LayerCache],
    readings: Sequence[Reading],
    lengths: Sequence[int],
    prefill: Prefill,
) -> None:
    """Read in one forward."""
    width = max(lengths)
    done = [reading.done for reading in readings]
    ends = [start + count for start, count in zip(done, lengths, strict=True)]
    capacity = capacity_for(max(ends))
    own: list[LayerCache] = [
        cache.of_prompts(
            [reading.states[n] if reading.states else [] for reading in readings], capacity
        )
        for n, cache in enumerate(caches)
    ]
    for reading in readings:
        # Arrays that only these rows hold are freed as they are read for the last time.
        reading.states = []
    # One more than the window has: a head reads the token after each position.
    tokens = [
        reading.history[start : end + 1] + [0] * (width - count)
        for reading, start, end, count in zip(readings, done, ends, lengths, strict=True)
    ]
    seats = [Seat(slot, indices(reading.pages)) for slot, reading in enumerate(readings)]
    table = table_of([seat.pages for seat in seats], pages_for(capacity))
    window = Window.of_prompts(done, lengths, width, table)
    hidden: mx.array | None = prefill(mx.array(tokens, mx.int32), own, window)
    told: list[mx.array] = []
    embedder = model.embedder
    if embedder and hidden is not None and window.lengths is not None:
        pooled = embedder.pool(hidden, window.lengths)
        for slot, reading in enumerate(readings):
            reading.pooled = embedder.joined(reading.pooled, pooled[slot])
            told.append(reading.pooled)
        hidden = None
    elif hidden is not None and _any_scored(readings, lengths):
        told = [hidden]
    else:
        # Its graph would hold the pages that are written to next.
        hidden = None
    mx.eval(told, [cache.written for cache in own])
    for cache in own:
        cache.fold(list(zip(seats, done, ends, strict=True)))
    mx.eval([cache.arrays for cache in own])
    for reading, seat, end in zip(readings, seats, ends, strict=True):
        reading.states = [[] if cache.paged else cache.held(seat, end) for cache in own]
        reading.done = end
    if hidden is not None:
        _score(model, readings, done, hidden)


def vectors_of(readings: Sequence[Reading], embedder: Embedder) -> dict[str, Report]:
    """The vectors of rows that are read, by their ids, each as long as its row asks."""
    pooled = mx.stack([reading.pooled for reading in readings if reading.pooled is not None])
    made = embedder.vectors(pooled, [len(reading.request.prompt) for reading in readings])
    return {
        reading.row_id: embedder.shortened(vector, reading.request.vector).tobytes()
        for reading, vector in zip(readings, made, strict=True)
    }


def _score(
    model: RaggedModel, readings: Sequence[Reading], before: Sequence[int], hidden: mx.array
) -> None:
    """Score the tokens that are asked for after those of a window.

    Args:
        before: tokens of each row before the window.
        hidden: what `RaggedModel.prefill` returned.
    """
    slots, places, tokens, owners = list[int](), list[int](), list[int](), list[Reading]()
    for slot, (reading, start) in enumerate(zip(readings, before, strict=True)):
        for position, token in reading.targets(start, reading.done):
            slots.append(slot)
            places.append(position - start)
            tokens.append(token)
            owners.append(reading)
    most = max(1, SCORED_AT_ONCE // model.vocabulary)
    alternatives = max((each.request.prompt_logprobs or 0 for each in owners), default=0)
    for part in (slice(at, at + most) for at in range(0, len(slots), most)):
        logits = model.logits(hidden[mx.array(slots[part]), mx.array(places[part])])
        scores = score(logits, tokens[part], alternatives)
        for reading, scored in zip(owners[part], scores, strict=True):
            reading.scored.append(scored)
