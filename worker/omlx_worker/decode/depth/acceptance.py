"""How many drafts rows may be expected to accept, by who drafts: the model itself, or lookups.

Each row has a record of either, with the record of all rows as prior. Which of the two counts for
a row in the next step is predicted: lookups, if the last search has found one.

Drafts that a grammar forces count as the model's own. If the model makes none, they are all that a
constrained row has beside lookups, up to any depth, and a step without one counts as a miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set

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


class Acceptance:
    """What is known of the drafts of all rows.

    Args:
        max_depth: drafts of a row and step, at most.
        own_depth: of those that the model itself makes.

    Attributes:
        own, lookup: records over all rows.
        totals: drafts that all rows are expected to accept, at each depth.
    """

    def __init__(self, max_depth: int, own_depth: int) -> None:
        self.own, self.lookup = Record(max_depth), Record(max_depth)
        self.totals: list[float] = []
        self._max_depth, self._own_depth = max_depth, own_depth
        self._limits: Mapping[str, int] = {}
        self._forced: Set[str] = frozenset()
        self._rows: dict[str, tuple[Record, Record]] = {}
        self._found: frozenset[str] = frozenset()
        self._predicted = deque[frozenset[str]](maxlen=AHEAD)

    def keep(self, limits: Mapping[str, int], constrained: Set[str] = frozenset()) -> None:
        """Know these rows, with the most drafts of each, and forget all others."""
        self._limits = limits
        self._forced = frozenset() if self._own_depth else constrained
        self.own.fold(MODEL_MEMORY)
        self.lookup.fold(MODEL_MEMORY)
        rows, self._rows = self._rows, {}
        for row_id in limits:
            made = rows.get(row_id) or (Record(self._max_depth), Record(self._max_depth))
            self._rows[row_id] = made
            self._expect(row_id, looked_up=False)
            self._expect(row_id, looked_up=True)
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
            row_id = emission.row_id
            if row_id in self._rows and emission.found is not None:
                (found.add if emission.found else found.discard)(row_id)
            if row_id in predicted and emission.foretold is not None:
                # A prediction also fails if nothing is found any more, or something wrong.
                judged = emission.looked_up and emission.drafted
                hit = emission.looked_up and emission.foretold and not depth
                counts = (emission.drafted, emission.accepted) if judged else (1, int(hit))
                changed |= self._add(row_id, *counts, looked_up=True)
            drafted = emission.drafted or int(depth > 0 and row_id in self._forced)
            if drafted and not emission.looked_up:
                changed |= self._add(row_id, drafted, emission.accepted, looked_up=False)
        if changed or found != self._found:
            self._found = frozenset(found)
            self._add_up()

    def _add(self, row_id: str, drafted: int, accepted: int, *, looked_up: bool) -> bool:
        """Count drafts of a row; returns whether its expectations have changed."""
        (self.lookup if looked_up else self.own).add(drafted, accepted)
        records = self._rows.get(row_id)
        if not records:
            return False
        record = records[looked_up]
        record.add(drafted, accepted)
        if 4 * record.news < record.tries[0]:
            return False
        self._expect(row_id, looked_up=looked_up)
        return True

    def _expect(self, row_id: str, *, looked_up: bool) -> None:
        limit = self._limits[row_id]
        if looked_up:
            self._rows[row_id][1].expect(self.lookup, limit)
        else:
            record = self._rows[row_id][0]
            depth = self._max_depth if row_id in self._forced else self._own_depth
            record.expect(self.own, min(limit, depth))
            # Deeper steps have no drafts but those looked up.
            record.expected[depth + 1 :] = [0.0] * (self._max_depth - depth)

    def _add_up(self) -> None:
        each = [records[row_id in self._found].expected for row_id, records in self._rows.items()]
        self.totals = [sum(column) for column in zip(*each, strict=True)] if each else []
