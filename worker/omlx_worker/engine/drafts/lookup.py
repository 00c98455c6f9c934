"""Drafts that are looked up: what followed the last tokens where they occurred before.

The longest suffix of a row's history, of `LONGEST` down to `SHORTEST` tokens, is searched for in
the row's own history and in a ring of texts that other rows have written. The tokens after the
match are the drafts. All of it runs on the device, inside the compiled step.

The idea is prompt lookup (Saxena 2023), over earlier outputs too as in suffix decoding (Oliaro et
al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

LONGEST, SHORTEST = 8, 3
"""Tokens of a match."""

LEAD = LONGEST - 1
"""Places before a text, so that a match may end at its first tokens too."""

PIECE = 256
"""Tokens that one block of a GPU searches."""

GAP = -1
"""Between two texts of a ring. No token, so no match crosses it."""

_NONE, _FIRST_RING = -2, 4096


@dataclass(frozen=True, slots=True)
class Lookup:
    """How a batch looks drafts up.

    Attributes:
        depth: drafts of a row and step, at most.
        ring: tokens of other rows' texts; 0 searches a row's own history alone.
    """

    depth: int = 8
    ring: int = 65_536


@dataclass(frozen=True)
class Found:
    """What a search found for each row.

    Attributes:
        lengths: ``[S]`` int32, tokens of the match; 0 for none.
        tokens: ``[S, K]`` int32, what followed it.
        counts: ``[S]`` int32, how many of them are drafts.
    """

    lengths: mx.array
    tokens: mx.array
    counts: mx.array


def search(history: mx.array, cursors: mx.array, ring: mx.array | None, depth: int) -> Found:
    """Look up to ``depth`` drafts up for every row.

    Of matches of one length the latest is taken, a row's own before the ring's.

    Args:
        history: ``[S, LEAD + L]`` int32, each token `LEAD` after its position, `GAP` before them.
            ``L`` is a multiple of `PIECE`.
        cursors: ``[S]`` int32, the position of each row's last token.
        ring: ``[R]`` int32, `LEAD` gaps, then texts with a `GAP` before each, or None; likewise.
    """
    text, start = history, 0
    if ring is not None:
        start = ring.shape[0]
        theirs = mx.broadcast_to(ring, (history.shape[0], start))
        text = mx.concatenate([theirs, history], axis=1)
    last = cursors[:, None] + start
    suffix = mx.take_along_axis(text, last + (LEAD - mx.arange(LONGEST)), axis=1)
    suffix = mx.where(suffix == GAP, _NONE, suffix)
    size = text.shape[1] - LEAD
    length: mx.array | int = 0
    for back in reversed(range(LONGEST)):
        shifted = text[:, LEAD - back : LEAD - back + size]
        length = (shifted == suffix[:, back : back + 1]) * (1 + length)
    ends = mx.arange(size)
    followed = mx.concatenate([text[:, LONGEST:] != GAP, mx.zeros_like(last) > 0], axis=1)
    allowed = (length >= SHORTEST) & (ends < last) & followed
    scores = mx.where(allowed, length * size + ends, 0)
    # In two stages, since a GPU gives a row to a single block.
    best = scores.reshape(scores.shape[0], -1, PIECE).max(axis=2).max(axis=1, keepdims=True)
    lengths, ends = best // size, best % size

    places = mx.arange(depth)
    # A text that repeats itself goes on repeating past its own end.
    after = ends + 1 + mx.where(ends < start, places, places % mx.maximum(last - ends, 1))
    tokens = mx.take_along_axis(text, after + LEAD, axis=1)
    counts = mx.where(tokens == GAP, places, depth).min(axis=1)
    lengths = lengths[:, 0]
    return Found(lengths, mx.maximum(tokens, 0), mx.where(lengths > 0, counts, 0))


class Ring:
    """The texts that ended last, on the device.

    Args:
        limit: tokens, rounded down to a multiple of `PIECE`. The ring doubles up to it, so that a
            few short texts are searched in no time.

    Attributes:
        tokens: ``[R]`` int32; see `search`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit // PIECE * PIECE
        self.tokens = mx.full((min(self._limit, _FIRST_RING),), GAP, mx.int32)
        self._end = LEAD

    def add(self, text: mx.array) -> None:
        """Write ``[N]`` int32 tokens over the oldest."""
        text = mx.concatenate([mx.array([GAP], mx.int32), text])[: self._limit - LEAD]
        end = self._end + text.shape[0]
        while end > (size := self.tokens.shape[0]) < self._limit:
            more = min(size, self._limit - size)
            self.tokens = mx.concatenate([self.tokens, mx.full((more,), GAP, mx.int32)])
        if end > size:
            self.tokens[self._end :] = GAP
            self._end, end = LEAD, LEAD + text.shape[0]
        self.tokens[self._end : end] = text
        self._end = end
