"""How many drafts rows may be expected to accept, by who drafts: the model itself, or lookups.

Each row has a record of either, with the record of all rows as prior. Which of the two counts for
a row in the next step is predicted: lookups, if the last search has found one. A third record says
how often that comes true. Where it does not, the model's own drafts are judged.

Drafts that a grammar forces count as the model's own. If the model makes none, they are all that a
constrained row has beside lookups, up to any depth, and a step without one counts as a miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from omlx_worker.engine.row import Emission

ROW_MEMORY, MODEL_MEMORY = 0.985, 0.9995  # of a record after one more draft: 65 drafts, 2,000
PRIOR = 4.0  # drafts that the model's record counts for in a row's
RATES = (0.8, 0.92)  # of a first draft, and of the next relative to it; high, so that some are made
AHEAD = 3  # steps from a decision to the outcome of its drafts


class Record:
    """Drafts judged and accepted at each position, with fading memory.

    Attributes:
        tries, hits: drafts judged and accepted, by position, as of the last `fold`.
        expected: how many of 0, 1, ... drafts are accepted.
        news: steps since the last `fold`.
    """

    def __init__(self, depth: int) -> None:
        self.tries, self.hits = [0.0] * depth, [0.0] * depth
        self.expected = [0.0] * (depth + 1)
        self.news, self._tried, self._hit = 0, [0] * (depth + 1), [0] * (depth + 1)

    def add(self, drafted: int, accepted: int) -> None:
        self.news += 1
        self._tried[drafted if accepted == drafted else accepted + 1] += 1
        self._hit[accepted] += 1

    def fold(self, memory: float) -> None:
        tried = hit = self.news = 0
        for position in reversed(range(len(self.tries))):
            tried, hit = tried + self._tried[position + 1], hit + self._hit[position + 1]
            self.tries[position] = self.tries[position] * memory**tried + tried
            self.hits[position] = self.hits[position] * memory**tried + hit
        self._tried, self._hit = [0] * len(self._tried), [0] * len(self._hit)

    def expect(self, model: Record, limit: int) -> None:
        """Fold, and work out ``expected`` up to ``limit`` drafts, with the model's as prior."""
        self.fold(ROW_MEMORY)
        self.expected = [0.0]
        general, rate, reach = 1.0, 1.0, 1.0
        for position in range(len(self.tries)):
            last, default = general, general * RATES[position > 0]
            tries, hits = model.tries[position], model.hits[position]
            general = (2 * PRIOR * default + hits) / (2 * PRIOR + tries)
            prior = min(rate * general / max(last, 1e-6), 1.0)
            tries, hits = self.tries[position], self.hits[position]
            rate = (PRIOR * prior + hits) / (PRIOR + tries)
            reach *= rate if position < limit else 0.0
            self.expected.append(self.expected[-1] + reach)


class Records(NamedTuple):
    """Records of the model's own drafts, of lookups, and of predicted lookups that came."""

    own: Record
    lookup: Record
    stays: Record


OWN, LOOKUP, STAYS = range(3)


class Acceptance:
    """What is known of the drafts of all rows.

    Args:
        max_depth: drafts of a row and step, at most.
        own_depth: of those that the model itself makes.

    Attributes:
        records: those over all rows.
        totals: drafts that all rows are expected to accept, at each depth.
    """

    def __init__(self, max_depth: int, own_depth: int) -> None:
        self.records = self._empty(max_depth)
        self.totals: list[float] = []
        self._max_depth, self._own_depth = max_depth, own_depth
        self._limits: Mapping[str, int] = {}
        self._forced: Set[str] = frozenset()
        self._rows: dict[str, Records] = {}
        self._found: frozenset[str] = frozenset()
        self._predicted = deque[frozenset[str]](maxlen=AHEAD)

    def keep(self, limits: Mapping[str, int], constrained: Set[str] = frozenset()) -> None:
        """Know these rows, with the most drafts of each, and forget all others."""
        self._limits = limits
        self._forced = frozenset() if self._own_depth else constrained
        for record in self.records:
            record.fold(MODEL_MEMORY)
        rows, self._rows = self._rows, {}
        for row_id in limits:
            self._rows[row_id] = rows.get(row_id) or self._empty(self._max_depth)
            for kind in (OWN, LOOKUP, STAYS):
                self._expect(row_id, kind)
        self._found &= self._rows.keys()
        self._add_up()

    def decide(self) -> None:
        """Remember which rows are expected to have looked-up drafts at the decision made now."""
        self._predicted.append(self._found)

    def observe(self, emissions: Sequence[Emission], depth: int) -> None:
        """Learn from the emissions of a step whose window had ``depth`` drafts."""
        predicted = self._predicted[0] if self._predicted else frozenset()
        found = set(self._found)
        changed = False
        for emission in emissions:
            row_id, drafted, accepted = emission.row_id, emission.drafted, emission.accepted
            if row_id in self._rows and emission.found is not None:
                (found.add if emission.found else found.discard)(row_id)
            if row_id in predicted and emission.foretold is not None:
                changed |= self._add(row_id, STAYS, 1, int(emission.looked_up))
                if emission.looked_up:
                    hit = emission.foretold and not depth
                    counts = (drafted, accepted) if drafted else (1, int(hit))
                    changed |= self._add(row_id, LOOKUP, *counts)
            judged = drafted or int(depth > 0 and row_id in self._forced)
            if judged and not emission.looked_up:
                changed |= self._add(row_id, OWN, judged, accepted)
        if changed or found != self._found:
            self._found = frozenset(found)
            self._add_up()

    @staticmethod
    def _empty(depth: int) -> Records:
        return Records(Record(depth), Record(depth), Record(1))

    def _add(self, row_id: str, kind: int, drafted: int, accepted: int) -> bool:
        """Count drafts of a row; returns whether its expectations have changed."""
        self.records[kind].add(drafted, accepted)
        records = self._rows.get(row_id)
        if not records:
            return False
        record = records[kind]
        record.add(drafted, accepted)
        if 4 * record.news < record.tries[0]:
            return False
        self._expect(row_id, kind)
        return True

    def _expect(self, row_id: str, kind: int) -> None:
        record, limit = self._rows[row_id][kind], self._limits[row_id]
        if kind == OWN:
            depth = self._max_depth if row_id in self._forced else self._own_depth
            record.expect(self.records.own, min(limit, depth))
            # Deeper steps have no drafts but those looked up.
            record.expected[depth + 1 :] = [0.0] * (self._max_depth - depth)
        else:
            record.expect(self.records[kind], limit)

    def _expected(self, row_id: str) -> Sequence[float]:
        """Drafts that a row is expected to accept, at each depth."""
        own, lookup, stays = self._rows[row_id]
        if row_id not in self._found:
            return own.expected
        comes = stays.expected[1]
        pairs = zip(lookup.expected, own.expected, strict=True)
        return [comes * found + (1 - comes) * made for found, made in pairs]

    def _add_up(self) -> None:
        each = [self._expected(row_id) for row_id in self._rows]
        self.totals = [sum(column) for column in zip(*each, strict=True)] if each else []
