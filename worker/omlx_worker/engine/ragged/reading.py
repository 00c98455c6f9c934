"""Reads prompts: windows that commit all of their tokens, of several rows in one forward.

A row that is read is pages, the states of layers that have none, and how many of its tokens are
computed. Its keys and values are written where its steps will read them. Rows with different
numbers of computed tokens are read together, unless their lengths are too far apart (`SPREAD`).
Windows are padded on the right: causal attention needs no mask for that, since padding comes after
everything that a row's own tokens see, and recurrent layers hold their states from the end of a
row's tokens on. Where they cannot, all rows read as many tokens as the shortest, again and again.

A window that meets a picture takes vectors in place of tokens, and rotates by positions of its own.
Only rows that are in such windows are read together, so that pictures do not change how the text of
others is rounded.

What a window gives is what scores the tokens after each of its own. Windows in which tokens are
scored are so narrow that `MOST_LOGITS` bounds their logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from omlx_worker.engine.caches.layout import Seat, capacity_for, indices, pages_for
from omlx_worker.engine.kernels.window import Window, table_of
from omlx_worker.engine.models.embedder import Embedder
from omlx_worker.engine.models.ragged_model import LayerCache, RaggedModel
from omlx_worker.engine.ragged.batch import Held
from omlx_worker.engine.ragged.sampling import score
from omlx_worker.engine.rows.row import Report, Row
from omlx_worker.engine.towers.positions import kinds_of, positions_of
from omlx_worker.engine.towers.tower import Seen, Tower

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


Reading = tuple[Row, Held]
"""A row whose tokens are read, and what is held of it."""


def targets_of(row: Row, start: int, end: int) -> list[tuple[int, int]]:
    """The tokens that a window from ``start`` to ``end`` scores, each after its position."""
    request = row.request
    if request.targets or not row.is_scored:
        return [
            (each.place - 1, each.token) for each in request.targets if start < each.place <= end
        ]
    last = min(end, len(request.prompt) - 1)
    return [(position, request.prompt[position + 1]) for position in range(start, last)]


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
    due = {row: count for (row, _), count in zip(readings, lengths, strict=True)}
    while rows := [reading for reading in readings if due[reading[0]]]:
        together = _together(rows, due)
        widths = [due[row] for row, _ in together]
        most = max(1, MOST_LOGITS // (model.vocabulary * len(together)))
        if max(widths) > most and _any_scored(together, widths):
            # What comes before scored tokens is read first, in windows of any width.
            unscored = [each for each in together if each[0].computed < each[0].shareable]
            together = unscored or together
            lengths = [row.shareable - row.computed if unscored else most for row, _ in together]
            widths = [min(due[row], each) for (row, _), each in zip(together, lengths, strict=True)]
        if not model.pads:
            widths = [min(widths)] * len(widths)
        _read(model, caches, together, widths, prefill or model.prefill)
        for (row, _), width in zip(together, widths, strict=True):
            due[row] -= width


def _any_scored(readings: Sequence[Reading], lengths: Sequence[int]) -> bool:
    """Whether the next tokens of these rows score any."""
    return any(
        targets_of(row, row.computed, row.computed + length)
        for (row, _), length in zip(readings, lengths, strict=True)
    )


def _together(rows: Sequence[Reading], due: dict[Row, int]) -> list[Reading]:
    """The longest of these rows, and those that may be read with it.

    All of them get its capacity.
    """
    needs = {row: room_for(row.computed + due[row]) for row, _ in rows}
    first, *others = sorted(rows, key=lambda reading: -needs[reading[0]])
    pictured = _meets_pictures(first[0], due[first[0]])
    others = [each for each in others if _meets_pictures(each[0], due[each[0]]) == pictured]
    together, capacity = [first], needs[first[0]]
    own = capacity
    for reading in others:
        own += needs[reading[0]]
        positions = (len(together) + 1) * capacity
        if positions > min(MOST_POSITIONS, SPREAD * own):
            break
        together.append(reading)
    return together


def _meets_pictures(row: Row, tokens: int) -> bool:
    """Whether any of a row's next tokens is of a picture, or between two."""
    pictures = row.request.pictures
    if not pictures:
        return False
    return row.computed < pictures[-1].end and row.computed + tokens > pictures[0].start


def _read(
    model: RaggedModel,
    caches: Sequence[LayerCache],
    readings: Sequence[Reading],
    lengths: Sequence[int],
    prefill: Prefill,
) -> None:
    """Read in one forward."""
    width = max(lengths)
    done = [row.computed for row, _ in readings]
    ends = [start + count for start, count in zip(done, lengths, strict=True)]
    capacity = capacity_for(max(ends))
    own: list[LayerCache] = [
        cache.of_prompts([held.layers[n] if held.layers else [] for _, held in readings], capacity)
        for n, cache in enumerate(caches)
    ]
    for _, held in readings:
        # Arrays that only these rows hold are freed as they are read for the last time.
        held.layers = []
    # One more than the window has: a head reads the token after each position.
    parts = [row.tokens[a : b + 1] for (row, _), a, b in zip(readings, done, ends, strict=True)]
    tokens = [part + [0] * (width + 1 - len(part)) for part in parts]
    seats = [Seat(slot, indices(row.pages)) for slot, (row, _) in enumerate(readings)]
    table = table_of([seat.pages for seat in seats], pages_for(capacity))
    shifts = [row.shift_at(row.computed) for row, _ in readings]
    window = Window.of_prompts(done, lengths, width, table, shifts)
    if model.looks and any(map(_meets_pictures, [row for row, _ in readings], lengths)):
        window = _with_pictures(model.looks.tower, window, readings, done, lengths)
    hidden: mx.array | None = prefill(mx.array(tokens, mx.int32), own, window)
    told: list[mx.array] = []
    embedder = model.embedder
    if embedder and hidden is not None and window.lengths is not None:
        pooled = embedder.pool(hidden, window.lengths)
        for slot, (_, held) in enumerate(readings):
            held.pooled = embedder.joined(held.pooled, pooled[slot])
            told.append(held.pooled)
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
    for (row, held), seat, end in zip(readings, seats, ends, strict=True):
        held.layers = [[] if cache.paged else cache.held(seat, end) for cache in own]
        row.computed = end
        unread = [each.start for each in row.request.pictures if each.end > end]
        held.seen = {start: held.seen[start] for start in held.seen.keys() & unread}
    if hidden is not None:
        _score(model, readings, done, hidden)


def _with_pictures(
    tower: Tower,
    window: Window,
    readings: Sequence[Reading],
    done: Sequence[int],
    lengths: Sequence[int],
) -> Window:
    """A window that meets pictures, with their positions and vectors."""
    width, parts = window.width, list[tuple[int, int, mx.array]]()
    blocks = np.zeros((len(readings), width), np.int32)
    for slot, ((row, held), start, count) in enumerate(zip(readings, done, lengths, strict=True)):
        for number, each in enumerate(row.request.pictures, 1):
            first, last = max(each.start, start), min(each.end, start + count)
            if first < last:
                blocks[slot, first - start : last - start] = number
                vectors = held.seen[each.start][first - each.start : last - each.start]
                parts.append((slot, first - start, vectors))
    if tower.sections:
        kinds = kinds_of(tower.sections)
        by_pair = [
            positions_of(row.request.pictures, start, start + width)[kinds].T
            for (row, _), start in zip(readings, done, strict=True)
        ]
        window = replace(window, positions=mx.array(np.stack(by_pair)))
    if any(each.both_ways for row, _ in readings for each in row.request.pictures):
        window = replace(window, blocks=mx.array(blocks))
    if not parts:
        return window
    size = parts[0][2].shape[1]
    seen = mx.zeros((len(readings), width, size), parts[0][2].dtype)
    for slot, first, vectors in parts:
        seen[slot, first : first + len(vectors)] = vectors
    return replace(window, seen=Seen(mx.array(blocks > 0), seen))


def vectors_of(readings: Sequence[Reading], embedder: Embedder) -> dict[Row, Report]:
    """The vectors of rows that are read, each as long as its row asks."""
    pooled = mx.stack([held.pooled for _, held in readings if held.pooled is not None])
    made = embedder.vectors(pooled, [len(row.request.prompt) for row, _ in readings])
    return {
        row: embedder.shortened(vector, row.request.vector).tobytes()
        for (row, _), vector in zip(readings, made, strict=True)
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
    for slot, ((row, held), start) in enumerate(zip(readings, before, strict=True)):
        for position, token in targets_of(row, start, row.computed):
            slots.append(slot)
            places.append(position - start)
            tokens.append(token)
            owners.append((row, held))
    most = max(1, SCORED_AT_ONCE // model.vocabulary)
    alternatives = max((row.request.prompt_logprobs or 0 for row, _ in owners), default=0)
    for part in (slice(at, at + most) for at in range(0, len(slots), most)):
        logits = model.logits(hidden[mx.array(slots[part]), mx.array(places[part])])
        scores = score(logits, tokens[part], alternatives)
        for (_, held), scored in zip(owners[part], scores, strict=True):
            held.scored.append(scored)
