"""Drafts that are looked up: what followed the last tokens where they occurred before.

The longest suffix of a row's history, of `LONGEST` down to `SHORTEST` tokens, is searched for in
the row's own history and in a ring of texts that other rows have written. The tokens after the
match are the drafts. All of it runs on the device.

The idea is prompt lookup (Saxena 2023), over earlier outputs too as in suffix decoding (Oliaro et
al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from omlx_producer.wire.request import MAX_DRAFT_DEPTH

LONGEST, SHORTEST = 8, 3
"""Tokens of a match."""

BEFORE_OWN = 5
"""Tokens of a match whose drafts replace the model's own."""

LEAD = LONGEST - 1
"""Entries before a text, so that a match may end at its first tokens too."""

PIECE = 256
"""Tokens that one thread block of a GPU searches."""

GAP, START = -1, -2
"""After each text of a ring, and before a history: no tokens, so no match crosses them."""

_FIRST_RING = 4096


@dataclass(frozen=True, slots=True)
class Lookup:
    """How a batch looks drafts up.

    Attributes:
        depth: drafts of a row and step, at most.
        ring: tokens of other rows' texts; 0 searches a row's own history alone.
    """

    depth: int = MAX_DRAFT_DEPTH
    ring: int = 65_536


def search(
    history: mx.array, cursors: mx.array, ring: mx.array | None, depth: int, shortest: int
) -> tuple[mx.array, mx.array]:
    """Find up to ``depth`` drafts for every row.

    Among matches of equal length, the latest wins, a row's own before the ring's. On a GPU the cost
    is that of the kernel launches, so indices are constants and most operations fuse.

    Args:
        history: ``[S, LONGEST + L]`` int32, each token `LEAD` after its position, `START` before
            them. ``L`` is a multiple of `PIECE`.
        cursors: ``[S]`` int32, the position of each row's last token.
        ring: ``[R]`` or ``[S, R]`` int32, `LEAD` gaps, then texts with a `GAP` after each; or None.
            ``R`` is a multiple of `PIECE` too.
        shortest: tokens of a match, at least.

    Returns:
        What followed each row's match, ``[S, depth]`` int32; and how many of these are drafts,
        ``[S]`` int32, 0 without a match.
    """
    text, start = history, 0
    if ring is not None:
        start = ring.shape[-1]
        theirs = mx.broadcast_to(ring, (history.shape[0], start))
        text = mx.concatenate([theirs, history], axis=1)
    size = text.shape[1] - LONGEST
    last = cursors[:, None]
    suffix = mx.take_along_axis(text, last + places(start + LEAD, -LONGEST), axis=1)
    shifted = [text[:, LEAD - back : LEAD - back + size] for back in range(LONGEST)]
    *equal, length = (part == suffix[:, b : b + 1] for b, part in enumerate(shifted))
    for same in reversed(equal):
        length = same * (1 + length)
    ends = places(0, size)
    allowed = (length >= shortest) & (ends < last + start) & (text[:, LONGEST:] >= 0)
    scores = mx.where(allowed, length * size + ends, 0)
    # In two stages, since a GPU gives a row to a single block.
    best = scores.reshape(scores.shape[0], -1, PIECE).max(axis=2).max(axis=1, keepdims=True)

    ahead, ends = places(0, depth), best % size
    # A text that repeats itself goes on repeating past its own end.
    period = mx.maximum(last + start - ends, 1)
    after = ends + (1 + LEAD) + mx.where(ends < start, ahead, ahead % period)
    tokens = mx.take_along_axis(text, after, axis=1)
    drafts = (tokens >= 0) & (best > 0)
    counts = mx.where(drafts, depth, ahead).min(axis=1)
    return mx.maximum(tokens, 0), counts


def places(first: int, count: int) -> mx.array:
    """``first``, and as many after it, or before it if ``count`` is negative; ``[|count|]``."""
    step = 1 if count > 0 else -1
    return mx.array(list(range(first, first + count, step)), mx.int32)


class Ring:
    """The texts that ended last, on the device.

    Args:
        limit: tokens, rounded down to a multiple of `PIECE`. The ring starts smaller and doubles up
            to it, so that a few short texts are cheap to search.

    Attributes:
        tokens: ``[R]`` int32; see `search`.
        owners: ``[R]`` int32, the owner of each token.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit // PIECE * PIECE
        self.tokens = mx.full((min(self._limit, _FIRST_RING),), GAP, mx.int32)
        self.owners = mx.zeros_like(self.tokens)
        self._end = LEAD

    def add(self, text: mx.array, owner: int = 0) -> None:
        """Write ``[N]`` int32 tokens over the oldest. A text longer than the ring is cut."""
        text = mx.concatenate([text[: self._limit - LEAD - 1], mx.array([GAP], mx.int32)])
        end = self._end + text.shape[0]
        while end > (size := self.tokens.shape[0]) < self._limit:
            more = min(size, self._limit - size)
            self.tokens = mx.concatenate([self.tokens, mx.full((more,), GAP, mx.int32)])
            self.owners = mx.concatenate([self.owners, mx.zeros((more,), mx.int32)])
        if end > size:
            self._end, end = LEAD, LEAD + text.shape[0]
        self.tokens[self._end : end] = text
        self.owners[self._end : end] = owner
        self._end = end
