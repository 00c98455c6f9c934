"""Looks drafts up in a dispatch of its own, right behind the step.

A batch that looks drafts up has ``history`` in its state too: ``[S, LONGEST + L]`` int32, every
token, the pending one included, `LEAD` after its position; `START` before them.

The search is compiled apart from the step and dispatched right behind it, so the host waits for
neither. A trace of a step takes as long as a dozen steps; that of a search takes next to nothing,
so the ring may grow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache, partial
from itertools import count

import mlx.core as mx

from omlx_worker.engine.drafts.lookup import (
    BEFORE_OWN,
    GAP,
    LEAD,
    PIECE,
    SHORTEST,
    START,
    Lookup,
    Ring,
    places,
    search,
)
from omlx_worker.engine.ragged.recurrent_cache import widened
from omlx_worker.engine.row import SOURCES

MOST_SALTS = 4096
"""Salts whose texts are looked up in. What a forgotten one left in the ring is found by nobody."""

_SOURCE = SOURCES.index("lookup")

State = dict[str, mx.array]


class Lookups:
    """What a batch looks drafts up in.

    Args:
        own_depth: drafts of a row and step, at most, that the model makes itself.
        vocabulary: tokens.
    """

    def __init__(self, lookup: Lookup, own_depth: int, vocabulary: int) -> None:
        self._ring = Ring(lookup.ring) if lookup.ring >= PIECE else None
        self._owners: OrderedDict[str, int] = OrderedDict()
        self._unused = count(1)
        self._own_depth = own_depth
        self._function = cache(
            lambda **options: mx.compile(partial(_look, **options, vocabulary=vocabulary))
        )

    def begin(self, history: Sequence[int]) -> State:
        """A joining row's part of the state, ``[1, ...]``."""
        return {"history": mx.array([[START] * LEAD + list(history)], mx.int32)}

    def owners(self, salts: Sequence[str | None]) -> mx.array:
        """``[S]`` int32: a number for each salt, never that of another one; 0 for none."""
        return mx.array([self._owner(salt) for salt in salts], mx.int32)

    def remember(self, text: mx.array, salt: str | None = None) -> None:
        """Look drafts of rows with this salt up in these tokens too, ``[N]`` int32, until they are
        the oldest."""
        if self._ring:
            self._ring.add(text, self._owner(salt))

    def step(
        self,
        before: State,
        after: State,
        emitted: mx.array,
        limits: mx.array,
        depth: int,
        owners: mx.array | None = None,
        *,
        ratio: bool,
    ) -> State:
        """Draft for the next step what can be looked up; returns the new state.

        Args:
            before, after: the state before a step and the one that it returned.
            emitted: ``[S, W]`` int32, the step's samples.
            limits: ``[S]`` int32, drafts of each row, at most.
            depth: drafts that the next step may judge for any row. With 0 the state says which rows
                have a match, so that the depth policy knows.
            owners: see `owners`; None if no row has a salt.
            ratio: whether a row's drafts are judged by the `ratio` rule.
        """
        ring = None
        if self._ring:
            theirs = mx.zeros_like(limits) if owners is None else owners
            ring = (self._ring.tokens, self._ring.owners, theirs)
        # In a deeper step the model drafts nothing that a match would have to beat.
        shortest = BEFORE_OWN if max(depth, 1) <= self._own_depth else SHORTEST
        function = self._function(depth=depth, shortest=shortest, ratio=ratio)
        found: State = function(before["history"], before["cursors"], after, emitted, limits, ring)
        return after | found

    def _owner(self, salt: str | None) -> int:
        if salt is None:
            return 0
        if salt not in self._owners:
            self._owners[salt] = next(self._unused)
        self._owners.move_to_end(salt)
        if len(self._owners) > MOST_SALTS:
            self._owners.popitem(last=False)
        return self._owners[salt]


def _look(
    history: mx.array,
    cursors: mx.array,
    after: State,
    emitted: mx.array,
    limits: mx.array,
    ring: tuple[mx.array, mx.array, mx.array] | None,
    *,
    depth: int,
    shortest: int,
    ratio: bool,
    vocabulary: int,
) -> State:
    written = cursors[:, None] + places(1 + LEAD, emitted.shape[1])
    history = mx.put_along_axis(history, written, emitted, axis=1)
    texts = None
    if ring is not None:
        tokens, owners, rows = ring
        texts = mx.where(owners == rows[:, None], tokens, GAP)
    drafts, counts = search(history, after["cursors"], texts, max(depth, 1), shortest)
    chosen = counts > 0
    state = {
        "history": history,
        "source": mx.where(chosen, _SOURCE, after["source"]),
        "drafted": mx.where(chosen, mx.minimum(counts, limits), after["drafted"]),
    }
    if depth:
        state |= merged(drafts, chosen, after, depth, vocabulary if ratio else 0)
    return state


def merged(tokens: mx.array, chosen: mx.array, after: State, depth: int, vocabulary: int) -> State:
    """The drafts of the next step: ``tokens`` where ``chosen``, ``[S]`` bool, else as they are.

    A draft that was not sampled is certain, so its distribution is a point mass: under ``ratio`` it
    is accepted with probability ``p(d)``, and replaced by a sample from the rest of ``p``.

    Args:
        tokens: ``[S, depth]`` int32.
        after: the state, with the model's own drafts if it has made any.
        vocabulary: 0 if no distributions are asked for.
    """
    where, state = chosen[:, None], {"drafts": tokens}
    if "drafts" in after:
        state["drafts"] = mx.where(where, tokens, widened(after["drafts"], depth))
    if vocabulary:
        weights = mx.where(mx.arange(vocabulary) == tokens[..., None], 0.0, -mx.inf)
        if "weights" in after:
            weights = mx.where(where[..., None], weights, widened(after["weights"], depth))
        state["weights"] = weights
    return state
