"""Looks drafts up in a dispatch of its own, right behind the step.

A batch that looks drafts up has these arrays in its state too:

``history``    ``[S, LONGEST + L]``, every token, the pending one included, `LEAD` after its
               position; `START` before them
``match``      tokens of the match that was looked up for the next step; 0 for none
``foretold``   the token that followed that match
``looked_up``  whether ``drafts`` are those that followed it

The search is compiled apart from the step and dispatched right behind it, so the host waits for
neither. A trace of a step takes as long as a dozen steps; that of a search takes next to nothing,
so the ring may grow and searches may be left out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any

import mlx.core as mx

from omlx_worker.engine.drafts.lookup import (
    GAP,
    LEAD,
    LONGEST,
    PIECE,
    SHORTEST,
    START,
    Lookup,
    Ring,
    places,
    search,
)
from omlx_worker.engine.drafts.trust import Trust
from omlx_worker.engine.ragged.recurrent_cache import widened

EVERY = 8
"""Steps from one search to the next while nothing is found, or no draft is judged anyway."""

MOST_SALTS = 4096
"""Salts whose texts are looked up in. What a forgotten one left in the ring is found by nobody."""

OF_LOOKUPS = ("match", "foretold", "looked_up")
"""Integers of the state, one a row."""

_RIGHT, _JUDGED, _FOUND = 1 << 8, 1 << 9, 1 << 10  # beside the length of a match


@dataclass(frozen=True, slots=True)
class Look:
    """What looking drafts up did for one row in one step.

    Attributes:
        match: tokens of the match that the step before had found; 0 for none.
        foretold: whether the token after that match is the step's first; None if the step before
            did not search.
        looked_up: whether the drafts that the step judged are those after the match.
        found: whether the drafts of the next step are looked up too; None without a search.
    """

    match: int
    foretold: bool | None
    looked_up: bool
    found: bool | None


@dataclass(frozen=True, slots=True)
class Looks:
    """What looking drafts up did for all rows in one step, on the device.

    Attributes:
        codes: ``[S]`` int32.
        foretells: whether the step before searched.
        searches: whether this one does.
    """

    codes: mx.array
    foretells: bool
    searches: bool

    def read(self) -> list[Look]:
        """Wait for the device; returns what was done for each slot."""
        codes: list[int] = self.codes.tolist()  # type: ignore[assignment]
        return [
            Look(
                code % _RIGHT,
                bool(code & _RIGHT) if self.foretells else None,
                bool(code & _JUDGED),
                bool(code & _FOUND) if self.searches else None,
            )
            for code in codes
        ]


class Lookups:
    """What a batch looks drafts up in, which matches it takes, and when it searches.

    Args:
        own_depth: drafts of a row and step, at most, that the model makes itself.
        vocabulary: tokens.
    """

    def __init__(self, lookup: Lookup, own_depth: int, vocabulary: int) -> None:
        self._own_depth = own_depth
        self._ring = Ring(lookup.ring) if lookup.ring >= PIECE else None
        self._trust = Trust(own=own_depth > 0)
        self._owners: OrderedDict[str, int] = OrderedDict()
        self._unused = count(1)
        self._lengths = {n: mx.array(n, mx.int32) for n in range(SHORTEST, LONGEST + 2)}
        self._steps = 0
        self._fruitless = 0
        self._searched = False
        self._function = cache(
            lambda **options: mx.compile(partial(_look, **options, vocabulary=vocabulary))
        )

    def begin(self, history: Sequence[int]) -> dict[str, mx.array]:
        """A joining row's part of the state, ``[1, ...]``."""
        state = {name: mx.zeros((1,), mx.int32) for name in OF_LOOKUPS}
        return state | {"history": mx.array([[START] * LEAD + list(history)], mx.int32)}

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
        before: dict[str, mx.array],
        after: dict[str, mx.array],
        emitted: mx.array,
        limits: mx.array,
        depth: int,
        owners: mx.array | None = None,
        *,
        ratio: bool,
    ) -> tuple[Looks | None, dict[str, mx.array]]:
        """Draft for the next step what can be looked up.

        Args:
            before, after: the state before a step and the one that it returned.
            emitted: ``[S, W]`` int32, the step's samples.
            limits: ``[S]`` int32, drafts of each row, at most.
            depth: drafts that the next step may judge for any row.
            owners: see `owners`; None if no row has a salt.
            ratio: whether a row's drafts are judged by the `ratio` rule.

        Returns:
            What was done, None if neither this step nor the one before searched; and the new
            state.
        """
        # Beyond its own depth the model drafts nothing that a match would have to beat.
        shortest = SHORTEST if depth > self._own_depth else self._trust.shortest
        foretells, self._searched = self._searched, self._due(depth)
        if not (foretells or self._searched):
            kept = {name: before[name] for name in OF_LOOKUPS}
            return None, after | kept | {"history": _written(before, emitted)}
        function = self._function(depth=depth, searches=self._searched, ratio=ratio)
        ring = None
        if self._ring:
            theirs = mx.zeros_like(limits) if owners is None else owners
            ring = (self._ring.tokens, self._ring.owners, theirs)
        codes, found = function(before, after, emitted, limits, self._lengths[shortest], ring)
        return Looks(codes, foretells, self._searched), after | found

    def learn(self, look: Look | None, drafted: int, accepted: int, *, teaches: bool) -> None:
        """Take in what a step found out about a row's drafts.

        Args:
            teaches: whether the outcome changes which matches are trusted. That of a row with a
                constraint does not, since forced drafts are always accepted.
        """
        if look and look.found:
            self._fruitless = 0
        if not teaches:
            return
        # A resumed row may bring a match into a step that no search came before.
        if look and look.match and look.foretold is not None:
            self._trust.match(look.match, right=look.foretold)
        if drafted and not (look and look.looked_up):
            self._trust.own(right=accepted > 0)

    def _owner(self, salt: str | None) -> int:
        if salt is None:
            return 0
        if salt not in self._owners:
            self._owners[salt] = next(self._unused)
        self._owners.move_to_end(salt)
        if len(self._owners) > MOST_SALTS:
            self._owners.popitem(last=False)
        return self._owners[salt]

    def _due(self, depth: int) -> bool:
        """Whether a step searches.

        One whose drafts are looked up alone always does. For any other a search is worth little
        where the last ones were in vain. Where the next step judges no draft, it only tells the
        depth policy what drafts would be worth.
        """
        self._steps += 1
        self._fruitless += 1
        if self._steps % EVERY == 0 or depth > self._own_depth:
            return True
        return depth > 0 and self._fruitless <= EVERY


def _look(
    before: dict[str, mx.array],
    after: dict[str, mx.array],
    emitted: mx.array,
    limits: mx.array,
    trusted: mx.array,
    ring: tuple[mx.array, mx.array, mx.array] | None,
    *,
    depth: int,
    searches: bool,
    ratio: bool,
    vocabulary: int,
) -> tuple[mx.array, dict[str, Any]]:
    history = _written(before, emitted)
    right = (before["match"] > 0) & (before["foretold"] == emitted[:, 0])
    looks = before["match"] + _RIGHT * right + _JUDGED * before["looked_up"]
    if not searches:
        none = mx.zeros_like(limits)
        return looks, {"history": history} | dict.fromkeys(OF_LOOKUPS, none)
    texts = None
    if ring is not None:
        tokens, owners, rows = ring
        texts = mx.where(owners == rows[:, None], tokens, GAP)
    found = search(history, after["cursors"], texts, max(depth, 1))
    chosen = found.lengths >= trusted
    state = {
        "history": history,
        "match": found.lengths,
        "foretold": found.tokens[:, 0],
        "looked_up": chosen.astype(mx.int32),
        "drafted": mx.where(chosen, mx.minimum(found.counts, limits), after["drafted"]),
    }
    if depth:
        state |= merged(found.tokens, chosen, after, depth, vocabulary if ratio else 0)
    return looks + _FOUND * chosen, state


def _written(before: dict[str, mx.array], emitted: mx.array) -> mx.array:
    """The histories with what a step has sampled."""
    cursors = before["cursors"][:, None] + places(1 + LEAD, emitted.shape[1])
    return mx.put_along_axis(before["history"], cursors, emitted, axis=1)


def merged(
    tokens: mx.array, chosen: mx.array, after: dict[str, mx.array], depth: int, vocabulary: int
) -> dict[str, mx.array]:
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
