"""How many drafts rows may be expected to accept.

A row has one record of the model's own drafts and one of those that are looked up or forced. The
record of all rows is the prior. A row is expected to draft from the source of its last step; in
steps deeper than the model's own, only from a match or a grammar.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set

from omlx_worker.engine.row import Emission

OF_ROW, OF_MODEL = 100, 3000  # first drafts after which a record's counts are halved
PRIOR = 4.0  # drafts that the model's record counts for in a row's
RATES = (0.8, 0.92)  # of a first draft, and of the next relative to it; high, so that some are made
AHEAD = 3  # steps from a decision to the outcome of its drafts
OWN, FOUND = 0, 1  # places of a row's records


class Record:
    """Drafts judged and accepted at each position, with fading memory.

    Args:
        depth: positions.
        most: first drafts that are counted before all counts are halved.
    """

    def __init__(self, depth: int, most: int) -> None:
        self.tries, self.hits = [0.0] * depth, [0.0] * depth
        self._most = most

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
            last, usual = general, general * RATES[1] if place else RATES[0]
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
            found = emission.source != "model"
            (self._found.add if found else self._found.discard)(row)
            if depth > self._own_depth and (found or row in sights):
                # A draft that is not there counts as one that is not accepted.
                self._add(row, FOUND, min(depth, self._limits[row]), accepted)
            elif drafted:
                self._add(row, FOUND if found else OWN, drafted, accepted)

    def totals(self) -> list[float]:
        """Drafts that all rows are expected to accept, at each depth."""
        totals = [0.0] * (self._max_depth + 1)
        for row, limit in self._limits.items():
            kind = FOUND if row in self._found or row in self._forced else OWN
            expected = self._rows[row][kind].expected(self._model[kind])
            deepest = self._max_depth if kind == FOUND else self._own_depth
            for depth in range(1, deepest + 1):
                totals[depth] += expected[min(depth, limit)]
        return totals

    def _records(self, most: int) -> list[Record]:
        return [Record(depth, most) for depth in (self._own_depth, self._max_depth)]

    def _add(self, row: str, kind: int, judged: int, accepted: int) -> None:
        self._rows[row][kind].add(judged, accepted)
        self._model[kind].add(judged, accepted)
