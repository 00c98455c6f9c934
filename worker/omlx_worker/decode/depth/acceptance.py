"""How many drafts rows may be expected to accept.

A row has a record of what it accepted with a match in sight and one without, in steps that the
model drafts for and in deeper ones, whose drafts are looked up alone. The record of all rows in the
same case is the prior. A match is in sight if the last search before the decision has found one.
Drafts that a grammar forces are accepted too, so without a head a constrained row has one in sight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set

from omlx_worker.engine.row import Emission

OF_ROW, OF_MODEL = 100, 3000  # first drafts after which a record's counts are halved
PRIOR = 4.0  # drafts that the model's record counts for in a row's
RATES = (0.8, 0.92)  # of a first draft, and of the next relative to it; high, so that some are made
AHEAD = 3  # steps from a decision to the outcome of its drafts
OWN, DEEP = 0, 2  # places of a row's records, without a match in sight; with one, the next


class Record:
    """Drafts judged and accepted at each position, with fading memory.

    Args:
        depth: positions.
        most: first drafts that are counted before all counts are halved.
        first: the rate of a first draft while nothing is known.
    """

    def __init__(self, depth: int, most: int, first: float = RATES[0]) -> None:
        self.tries, self.hits = [0.0] * depth, [0.0] * depth
        self._most, self._first = most, first

    def add(self, judged: int, accepted: int) -> None:
        for place in range(accepted):
            self.tries[place] += 1
            self.hits[place] += 1
        if accepted < judged:
            self.tries[accepted] += 1
        if self.tries and self.tries[0] > self._most:
            self.tries = [count / 2 for count in self.tries]
            self.hits = [count / 2 for count in self.hits]

    def expected(self, model: Record) -> list[float]:
        """How many of 0, 1, ... drafts are accepted, with the model's record as prior."""
        expected, general, rate, reach = [0.0], 1.0, 1.0, 1.0
        for place, (tries, hits) in enumerate(zip(self.tries, self.hits, strict=True)):
            last, usual = general, general * RATES[1] if place else self._first
            general = (2 * PRIOR * usual + model.hits[place]) / (2 * PRIOR + model.tries[place])
            prior = min(rate * general / max(last, 1e-6), 1.0)
            rate = (PRIOR * prior + hits) / (PRIOR + tries)
            reach *= rate
            expected.append(expected[-1] + reach)
        return expected


class Acceptance:
    """What is known of the drafts of all rows.

    Args:
        max_depth: drafts of a row and step, at most.
        own_depth: of those that the model itself makes; deeper steps have looked-up drafts alone.
    """

    def __init__(self, max_depth: int, own_depth: int) -> None:
        self._max_depth, self._own_depth = max_depth, own_depth
        self._model, self._rows = self._records(OF_MODEL), dict[str, list[Record]]()
        self._limits: Mapping[str, int] = {}
        self._forced: Set[str] = frozenset()
        self._found = set[str]()
        self._sights = deque[frozenset[str]](maxlen=AHEAD)

    def keep(self, limits: Mapping[str, int], constrained: Set[str] = frozenset()) -> None:
        """Know these rows, with the most drafts of each, and forget all others."""
        self._limits = limits
        self._forced = frozenset() if self._own_depth else constrained
        self._rows = {row: self._rows.get(row) or self._records(OF_ROW) for row in limits}
        self._found &= limits.keys()

    def decide(self) -> None:
        """Remember which rows have a match in sight at the decision made now."""
        self._sights.append(frozenset(self._found | self._forced))

    def observe(self, emissions: Sequence[Emission], depth: int) -> None:
        """Learn from the emissions of a step whose window had ``depth`` drafts."""
        sights = self._sights[0] if self._sights else frozenset[str]()
        for emission in emissions:
            row, drafted, accepted = emission.row_id, emission.drafted, emission.accepted
            if row not in self._rows:
                continue
            if emission.found is not None:
                (self._found.add if emission.found else self._found.discard)(row)
            seen = row in sights or emission.looked_up
            if depth > self._own_depth:
                # A draft that is not there counts as one that is not accepted.
                self._add(row, DEEP + seen, min(depth, self._limits[row]), accepted)
                continue
            foretold = seen and emission.foretold is not None
            if drafted:
                self._add(row, OWN + seen, drafted, accepted)
            elif foretold and emission.looked_up:
                self._add(row, OWN + seen, 1, int(emission.foretold or 0))
            if foretold:
                judged = drafted and emission.looked_up
                counts = (drafted, accepted) if judged else (1, int(emission.foretold or 0))
                self._add(row, DEEP + seen, *counts)

    def totals(self) -> list[float]:
        """Drafts that all rows are expected to accept, at each depth."""
        totals = [0.0] * (self._max_depth + 1)
        for row, limit in self._limits.items():
            seen = row in self._found or row in self._forced
            own, deep = (
                self._rows[row][kind + seen].expected(self._model[kind + seen])
                for kind in (OWN, DEEP)
            )
            for depth in range(1, self._max_depth + 1):
                expected = own if depth <= self._own_depth else deep
                totals[depth] += expected[min(depth, limit)]
        return totals

    def _records(self, most: int) -> list[Record]:
        own, deep = self._own_depth, self._max_depth
        deep *= deep > own
        pairs = ((own, RATES[0]), (own, RATES[0]), (deep, 0.0), (deep, RATES[0]))
        return [Record(depth, most, first) for depth, first in pairs]

    def _add(self, row: str, kind: int, judged: int, accepted: int) -> None:
        if self._model[kind].tries:
            self._rows[row][kind].add(judged, accepted)
            self._model[kind].add(judged, accepted)
