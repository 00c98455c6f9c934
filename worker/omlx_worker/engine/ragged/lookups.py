"""Drafts that are looked up: what followed a row's last tokens where they occurred before.

The longest suffix of a row's history, of `LONGEST` tokens or fewer, is searched for earlier in the
same history, the prompt included. The tokens after the match are the drafts. The search is part of
the step's dispatch, so all of it stays on the device. Rows look up nothing in each other's texts.
Steps without drafts search nothing: for the depth policy `Runs` tells which rows have a match.

A batch that looks drafts up has ``history`` in its state: ``[S, LONGEST + L]`` int32, every token,
the pending one included, `LEAD` after its position; `START` before them, and one entry to spare.

The idea is prompt lookup (Saxena 2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import mlx.core as mx

from omlx_worker.engine.caches.layout import Layout
from omlx_worker.engine.caches.recurrent_cache import widened
from omlx_worker.engine.kernels.window import TAIL
from omlx_worker.engine.rows.row import SOURCES

LONGEST, SHORTEST = 8, 3
"""Tokens of a match."""

BEFORE_OWN = 5
"""Tokens of a match whose drafts replace the model's own."""

LEAD = LONGEST - 1
"""Entries before a history, so that a match may end at its first tokens too."""

START = -1
"""Before a history: no token, so no match begins there."""

PIECE = 256
"""Tokens that one thread block of a GPU searches."""

_SOURCE = SOURCES.index("lookup")


class Runs:
    """The runs of ``length`` tokens in a text that the host has read.

    Attributes:
        recurs: whether the text ends with a run that occurred before, which is a match.
    """

    def __init__(self, tokens: Iterable[int], length: int) -> None:
        self.recurs = False
        self._last = deque[int](maxlen=length)
        self._seen: set[tuple[int, ...]] = set()
        self.commit(tokens)

    def commit(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text's end."""
        for token in tokens:
            self._last.append(token)
            run = tuple(self._last)
            self.recurs = run in self._seen
            self._seen.add(run)


def history_length(layout: Layout) -> int:
    """Tokens of a history: of a body and a tail, in whole pieces, and `LONGEST`."""
    positions = layout.capacity + TAIL
    return LONGEST + -(-positions // PIECE) * PIECE


def history_of(tokens: Sequence[int]) -> mx.array:
    """The history of a row that joins with these tokens, ``[1, LEAD + N]``."""
    return mx.array([[START] * LEAD + list(tokens)], mx.int32)


def extended(history: mx.array, cursors: mx.array, emitted: mx.array) -> mx.array:
    """The histories with a step's samples ``[S, W]``; ``cursors`` are those before it."""
    places = cursors[:, None] + _places(1 + LEAD, emitted.shape[1])
    return mx.put_along_axis(history, places, emitted, axis=1)


def look_up(
    state: dict[str, mx.array], limits: mx.array, depth: int, shortest: int
) -> dict[str, mx.array]:
    """The arrays of the state that change when drafts are looked up.

    Args:
        state: after a step, ``history`` included.
        limits: ``[S]`` int32, drafts of each row, at most.
        depth: drafts that the next step may judge for any row, at least 1.
        shortest: tokens of a match, at least.
    """
    tokens, found = search(state["history"], state["cursors"], depth, shortest)
    return {
        "source": mx.where(found, _SOURCE, state["source"]),
        "offered": mx.where(found, mx.minimum(limits, depth), state["offered"]),
        "drafts": merged(tokens, found, state, depth),
    }


def search(
    history: mx.array, cursors: mx.array, depth: int, shortest: int
) -> tuple[mx.array, mx.array]:
    """What followed the latest of the longest matches of every row, ``[S, depth]`` int32, and
    whether it has one, ``[S]`` bool.

    On a GPU the cost is that of the kernel launches, so indices are constants and most operations
    fuse.

    Args:
        history: ``[S, LONGEST + L]``; ``L`` is a multiple of `PIECE`.
        cursors: ``[S]`` int32, the position of each row's last token.
        shortest: tokens of a match, at least.
    """
    size = history.shape[1] - LONGEST
    last = cursors[:, None]
    suffix = mx.take_along_axis(history, last + _places(LEAD, -LONGEST), axis=1)
    shifted = [history[:, LEAD - back : LEAD - back + size] for back in range(LONGEST)]
    # How many tokens match before each place, counted backwards; a mismatch ends the count.
    *equal, length = (part == suffix[:, b : b + 1] for b, part in enumerate(shifted))
    for same in reversed(equal):
        length = same * (1 + length)
    ends = _places(0, size)
    scores = mx.where((length >= shortest) & (ends < last), length * size + ends, 0)
    # In two stages, since a GPU gives a row to a single block.
    best = scores.reshape(scores.shape[0], -1, PIECE).max(axis=2).max(axis=1, keepdims=True)

    ends = best % size
    # A text that repeats itself goes on repeating past its own end.
    after = ends + (1 + LEAD) + _places(0, depth) % mx.maximum(last - ends, 1)
    return mx.take_along_axis(history, after, axis=1), best[:, 0] > 0


def merged(tokens: mx.array, chosen: mx.array, state: dict[str, mx.array], depth: int) -> mx.array:
    """The drafts of the next step: ``tokens`` where ``chosen``, ``[S]`` bool, else as they are.

    Args:
        tokens: ``[S, depth]`` int32.
        state: after a step, with the model's own drafts if it has made any.
    """
    if "drafts" not in state:
        return tokens
    return mx.where(chosen[:, None], tokens, widened(state["drafts"], depth))


def _places(first: int, count: int) -> mx.array:
    """``first``, and as many after it, or before it if ``count`` is negative; ``[|count|]``."""
    step = 1 if count > 0 else -1
    return mx.array(list(range(first, first + count, step)), mx.int32)
